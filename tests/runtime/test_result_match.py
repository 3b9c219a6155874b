"""Files of two runs do not mix: each has a checksum of its own, and the run's result names the others."""

import json
import shutil

import pytest

import fedfm
from fedfm.api import execute
from fedfm.api.join import join
from fedfm.api.predict import export, predict
from fedfm.api.signature import sign, verify
from fedfm.errors import InputError
from fedfm.reports import dossier, html
from small import experiment
from stopping import StopAfter, run_stopped

QUIET = fedfm.Progress()
METHODS = {"fedavg": None, "fedncm": None, "fedbip": "client-00"}  # for each the owner of the model, if it has one


def settings(folder, name, seed):
    found = experiment(folder, run={"seed": seed})
    found["method"] = {"name": name} | ({"rounds": 1, "local": {"learning_rate": 0.2}} if name != "fedncm" else {})
    found["data"]["test_fraction"] = 0.2
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs of each method, of the same settings but the seed of the partition."""
    folder = tmp_path_factory.mktemp("two")
    for name in METHODS:
        for seed in (1, 2):
            execute.run(settings(folder, name, seed), folder / f"{name}{seed}", progress=QUIET)
    return folder


def uses(run, client, out):
    """Everything that takes the model from the run's files."""
    rows = run.parent / "rows.npz"
    yield lambda: predict(run, rows, client, progress=QUIET)
    yield lambda: export(run, "torch", out, client)
    yield lambda: execute.resume(run, progress=QUIET)
    yield lambda: join(run, rows, progress=QUIET)


@pytest.mark.parametrize("name", METHODS)
def test_no_command_takes_a_file_of_another_run_for_the_runs_own(name, runs, tmp_path):
    client = METHODS[name]
    honest = shutil.copytree(runs / f"{name}1", runs / f"{name}-honest")
    for use in uses(honest, client, tmp_path / "honest"):
        use()
    for part in ("clients",) if client else ("checkpoint",):
        mixed = shutil.copytree(runs / f"{name}1", runs / f"{name}-{part}")
        shutil.rmtree(mixed / part)
        shutil.copytree(runs / f"{name}2" / part, mixed / part)
        found = []
        for use in uses(mixed, client, tmp_path / part):
            try:
                use()
            except InputError as error:
                found.append(str(error))
        assert len(found) >= 3 if client else len(found) == 4  # fedbip's newcomer takes the checkpoint, which is whole
        assert not (tmp_path / part).exists()
    other = shutil.copytree(runs / f"{name}1", runs / f"{name}-manifest")
    shutil.copy(runs / f"{name}2" / "manifest.json", other)
    with pytest.raises(InputError, match="another value"):
        execute.resume(other, progress=QUIET)


def test_a_checkpoint_with_the_same_settings_and_other_parameters_is_refused(runs):
    twin = shutil.copytree(runs / "fedavg1", runs / "twin")
    manifest = json.loads((twin / "manifest.json").read_text())
    manifest["result"]["params_sha256"] = "0" * 64
    (twin / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="not the parameters of the result"):
        predict(twin, runs / "rows.npz", progress=QUIET)


def test_the_sums_of_an_earlier_newcomer_are_those_that_it_brought(runs):
    run = shutil.copytree(runs / "fedncm1", runs / "newcomers")
    join(run, runs / "rows.npz", "early", progress=QUIET)
    sums = run / "clients" / "early" / "adapter" / "sums.safetensors"
    data = sums.read_bytes()
    sums.write_bytes(data[:-4] + bytes(4))
    with pytest.raises(InputError, match=r"sums\.safetensors is not the file that this run wrote"):
        join(run, runs / "rows.npz", "late", progress=QUIET)


@pytest.mark.parametrize(("key", "value"), [("scale", "row"), ("val_fraction", 0.3), ("without", ["client-01"])])
def test_settings_of_the_rows_are_kept_like_all_others(key, value, tmp_path):
    run_stopped(experiment(tmp_path, run={"workers": 1}), tmp_path / "run", progress=StopAfter(1))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    manifest["experiment"]["data"][key] = value
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=rf"data\.{key} had another value in round 1"):
        fedfm.resume(tmp_path / "run", progress=QUIET)


def test_pages_and_signatures_of_a_received_run_run_none_of_its_code(runs, tmp_path, monkeypatch):
    """A method ``module:Class`` is imported by commands that compute with it, and by no other."""
    run = shutil.copytree(runs / "fedbip1", tmp_path / "run")
    (tmp_path / "left_a_mark.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["experiment"]["method"]["name"] = "left_a_mark:Method"
    (run / "manifest.json").write_text(json.dumps(manifest))
    sign(run, tmp_path / "key.pem")
    assert verify(run, tmp_path / "key.pem.pub").valid
    html.write(run)
    assert "one model for each client" in dossier.write(run).read_text()  # its files tell it
    assert not (tmp_path / "mark").exists()
    with pytest.raises(InputError, match="left_a_mark"):
        predict(run, runs / "rows.npz", "client-00", progress=QUIET)
    assert (tmp_path / "mark").exists()
