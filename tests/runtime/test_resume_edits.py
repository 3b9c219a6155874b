"""A resumed run keeps the experiment with which its rounds were computed, and says which libraries have changed."""

import json

import pytest

import fedfm
from fedfm.errors import InputError
from fedfm.runtime.resume_changes import MOVABLE, changed_keys
from small import experiment
from stopping import StopAfter, run_stopped

QUIET = fedfm.Progress()
EDITS = {
    "method.local.learning_rate": 0.9,
    "method.local.epochs": 3,
    "method.fraction": 0.5,
    "run.seed": 7,
    "run.min_clients": 1,
    "model.max_length": 64,
    "aggregation.name": "median",
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edits")
    run_stopped(experiment(folder, run={"workers": 1}), folder / "run", progress=StopAfter(1))
    return folder / "run"


def edit(run, change):
    path = run / "manifest.json"
    before = path.read_text()
    manifest = json.loads(before)
    change(manifest)
    path.write_text(json.dumps(manifest))
    return before


@pytest.mark.parametrize("key", EDITS)
def test_an_experiment_that_was_edited_in_the_manifest_is_refused(key, stopped):
    def put(manifest):
        *tables, last = key.split(".")
        inner = manifest["experiment"]
        for name in tables:
            inner = inner.setdefault(name, {})
        inner[last] = EDITS[key]

    before = edit(stopped, put)
    with pytest.raises(InputError, match=rf"manifest\.json was changed: {key} had another value in round 1"):
        fedfm.resume(stopped, progress=QUIET)
    (stopped / "manifest.json").write_text(before)


def test_places_and_rounds_may_change():
    assert changed_keys({"run": {"workers": 1, "seed": 0}}, {"run": {"workers": 2, "seed": 0}}) == []
    assert changed_keys({"run": {"seed": 0}}, {"run": {"seed": 0}, "privacy": {"unit": "client"}}) == ["privacy.unit"]
    assert "run.workers" in MOVABLE


def test_other_versions_are_noted_and_the_run_continues(stopped):
    edit(stopped, lambda manifest: manifest["versions"].update(torch="1.0.0"))
    fedfm.resume(stopped, progress=QUIET)
    notices = fedfm.load_run(stopped).manifest["notices"]
    assert [text for text in notices if "other versions" in text and "torch 1.0.0 -> " in text]
