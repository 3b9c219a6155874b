"""The files of a run with [privacy] outside of private/ contain nothing about its rows but the release."""

import json
import re

import numpy as np
import pytest

import fedfm
from fedfm.api import execute
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.data.load import load_table
from fedfm.data.table import fingerprint
from fedfm.errors import InputError
from fedfm.methods.fedpft import private
from fedfm.methods.fedpft.fedpft import FedPFT
from fedfm.privacy.spec import PrivacySpec
from fedfm.runtime.disclosure import private_notices, tell
from fedfm.runtime.progress import Progress
from fedfm.runtime.run_directory import Run
from fedfm.runtime.sharing import FILE, do_not_share

D, CLASSES, TRAIN = 6, 4, 300
RECORD = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
ONE = {"covariance": "spherical", "components": 1}
METHODS = {
    "star": ONE,
    "chain": {**ONE, "topology": "chain"},
    "pooled": {**ONE, "pooled": True},
}
NEIGHBOURS = ("moved", "removed", "relabelled")
DATE = re.compile(rb"\d{4}-\d\d-\d\dT[\d:]+\+00:00")


def rows(folder, neighbour=None):
    """The data set, or one that differs in its first training row."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, TRAIN + 80)
    x = (rng.normal(size=(CLASSES, D))[y] * 3 + rng.normal(size=(len(y), D))).astype(np.float32)
    split = np.where(np.arange(len(y)) < TRAIN, "train", "test")
    if neighbour == "moved":
        x[0] = -x[0]
    if neighbour == "relabelled":
        y[0] = (y[0] + 1) % CLASSES
    keep = np.arange(len(y)) >= (1 if neighbour == "removed" else 0)
    folder.mkdir(exist_ok=True)
    names = np.array([f"c{c}" for c in range(CLASSES)])
    np.savez(folder / "rows.npz", x=x[keep], y=y[keep], split=split[keep], classes=names)
    return folder


def tables(method=ONE, **data):
    """Tables of an experiment whose data are on the machine that runs it."""
    partition = {"name": "dirichlet", "alpha": 0.5, "clients": 3}
    return {
        "data": {"path": "rows.npz", "partition": partition, **data},
        "model": {"name": "features"},
        "method": {"name": "fedpft", **method},
        "privacy": RECORD,
        "run": {"workers": 1},
    }


def run_in(folder, monkeypatch, table):
    """The files of a run in this folder that are not under private/, by name; dates taken out."""
    monkeypatch.chdir(folder)
    fedfm.run(table, "run")
    assert main(["report", "run"]) == 0
    found = {str(p.relative_to(folder / "run")): p.read_bytes() for p in folder.glob("run/**/*") if p.is_file()}
    return {name: DATE.sub(b"", data) for name, data in found.items() if not name.startswith("private/")}


@pytest.fixture
def still(monkeypatch):
    """A clock that stands: durations are part of reports."""
    monkeypatch.setattr("fedfm.runtime.server.time.perf_counter", lambda: 0.0)


def without_fingerprint(files):
    """The same but for the keyed hash of the rows, and the hash itself."""
    data = json.loads(files["manifest.json"])["fingerprints"]["data"]
    return {name: text.replace(data.encode(), b"") for name, text in files.items()}, data


@pytest.mark.each_value
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_all_that_differs_between_neighbours_comes_from_the_release(
    tmp_path, monkeypatch, still, capsys, method, neighbour
):
    """With the first data set's release in the place of the second's, their public files are the same bytes."""
    kept = {}

    def once(name):
        release = getattr(private, name)

        def repeated(first, *rest, **keys):
            return kept.setdefault((name, getattr(first, "id", "")), release(first, *rest, **keys))

        monkeypatch.setattr(private, name, repeated)

    for name in ("noisy_sums", "federation_sum"):
        once(name)
    table = tables(METHODS[method])
    one, its = without_fingerprint(run_in(rows(tmp_path / "a"), monkeypatch, table))
    other, others = without_fingerprint(run_in(rows(tmp_path / "b", neighbour), monkeypatch, table))
    assert kept
    assert {"manifest.json", "metrics.jsonl", "messages.jsonl", "report.html", "adapter/model.safetensors"} <= set(one)
    assert sorted(one) == sorted(other)
    assert [name for name in one if one[name] != other[name]] == []
    assert its != others


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_under_one_key_the_release_moves_results_and_nothing_else(tmp_path, monkeypatch, still, capsys, neighbour):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
    one, _ = without_fingerprint(run_in(rows(tmp_path / "a"), monkeypatch, tables()))
    other, _ = without_fingerprint(run_in(rows(tmp_path / "b", neighbour), monkeypatch, tables()))
    differ = {name for name in one if one[name] != other[name]}
    results = {"manifest.json", "metrics.jsonl", "report.html", "adapter/model.safetensors"}
    assert differ == results | {"adapter/fedfm.json", "checkpoint/round-000001.safetensors"}
    manifests = [json.loads((tmp_path / folder / "run/manifest.json").read_text()) for folder in "ab"]
    changed = {key for key in manifests[0] if manifests[0][key] != manifests[1][key]}
    # What is said of rows that the noise leaves out follows from the noisy counts.
    assert changed - {"created", "finished", "notices"} == {"fingerprints", "model_files", "result"}
    lines = [(tmp_path / folder / "run/metrics.jsonl").read_text().splitlines()[0] for folder in "ab"]
    assert lines[0] == lines[1]  # of the start, before anything was released


def test_two_runs_on_the_same_rows_have_fingerprints_of_their_own_and_neither_is_the_hash(tmp_path, monkeypatch):
    monkeypatch.chdir(rows(tmp_path / "a"))
    found = [fedfm.load_run(fedfm.run(tables(), out)["run"]).manifest["fingerprints"] for out in ("one", "two")]
    plain = fingerprint(load_table(Experiment.from_dict(tables()).data, seed=0, task=None))
    assert len({f["data"] for f in found} | {plain}) == 3
    assert found[0]["model"] == found[1]["model"]


def test_the_owner_finds_counts_and_notices_under_private(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(rows(tmp_path / "a"))
    kept = np.load("rows.npz")
    np.savez("rows.npz", **kept, extra=np.zeros((len(kept["y"]), 2)))  # read with a notice
    without = {key: value for key, value in tables().items() if key != "privacy"}
    told = []
    watcher = Progress()
    watcher.notice = told.append
    open_, hidden = (
        execute.run(table, out, progress=watcher) for table, out in ((without, "open"), (tables(), "hidden"))
    )
    shown, manifest = (fedfm.load_run(result["run"]).manifest for result in (open_, hidden))
    assert [n for n in shown["notices"] if "extra" in n]
    assert len([n for n in told if "extra" in n]) == 2
    path = tmp_path / "a" / "hidden" / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    of_rows = [n for n in shown["notices"] if "withheld" not in n]  # which the method says of its own messages
    known = {"profile": shown["profile"], "partition": shown["fingerprints"]["partition"]}
    assert json.loads(path.read_text()) == {"split": shown["split"], "notices": of_rows, **known}
    assert not {"profile", "partition"} & (manifest.keys() | manifest["fingerprints"].keys())
    assert private_notices(fedfm.load_run("hidden")) == of_rows
    assert not [n for n in manifest["notices"] if "noisy" not in n]
    assert manifest["split"] == {k: shown["split"][k] for k in ("kind", "source", "classes")} | {"counts": FILE}
    page = (tmp_path / "a" / "hidden" / "report.html").read_text() if main(["report", "hidden"]) == 0 else ""
    assert FILE in page
    assert "extra" not in page
    assert "training row" not in page.partition('id="split"')[2][:2000]


def test_of_silos_with_rows_of_their_own_nothing_is_counted(tmp_path):
    run = Run.create(Experiment.from_dict(tables()), tmp_path / "run")
    tell(run, {"kind": "features", "source": "f", "classes": ["a"], "clients": {"c": 3}}, ["a notice"])
    tell(run, None, [])
    assert run.manifest["split"] is None
    assert json.loads((run.path / FILE).read_text()) == {"split": None, "notices": []}
    (run.path / FILE).write_text('{"notices"')
    assert private_notices(run) == []


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A private run that was stopped in its round."""
    monkeypatch.chdir(rows(tmp_path / "a"))

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FedPFT, "step", stop)
        with pytest.raises(KeyboardInterrupt):
            fedfm.run(tables(), "run")
    return tmp_path / "a"


def test_a_resumed_run_goes_on_with_its_own_rows_alone(stopped):
    rows(stopped, "moved")
    with pytest.raises(InputError, match="the data changed since this run began"):
        fedfm.resume("run")
    rows(stopped)
    before = fedfm.load_run("run").manifest["fingerprints"]
    assert fedfm.resume("run")["epsilon"] == 8.0
    assert fedfm.load_run("run").manifest["fingerprints"] == before
    rows(stopped, "removed")
    assert main(["audit", "run", "--attack", "membership"]) == 2


def test_without_the_key_of_its_fingerprint_a_run_is_refused(stopped, capsys):
    key = stopped / "run/private/data/fingerprint.secret"
    kept = key.read_bytes()
    key.unlink()
    assert main(["resume", "run"]) == 2
    assert "fingerprint.secret is missing" in capsys.readouterr().err
    key.write_bytes(kept)
    assert main(["resume", "run"]) == 0
    key.unlink()
    assert main(["audit", "run", "--attack", "membership"]) == 2
    assert "fingerprint.secret is missing" in capsys.readouterr().err


def test_a_run_may_go_on_without_the_key_of_its_fingerprint(stopped):
    (stopped / "run/private/data/fingerprint.secret").unlink()
    before = fedfm.load_run("run").manifest["fingerprints"]
    result = fedfm.resume("run", accept_loss=True)
    assert [mark["file"] for mark in result["lost"]] == ["private/data/fingerprint.secret"]
    now = fedfm.load_run("run").manifest["fingerprints"]
    assert now["data"] != before["data"]
    assert now["model"] == before["model"]


def test_only_the_code_of_a_clients_exception_is_written(tmp_path, monkeypatch):
    def fails(client, plan):
        if client.id == "client-01":
            raise ValueError(f"row {client.data.train.tensors['features'][0].tolist()}")
        return release(client, plan)

    release = private.noisy_sums
    monkeypatch.setattr(private, "noisy_sums", fails)
    monkeypatch.chdir(rows(tmp_path / "a"))
    result = fedfm.run(tables(), "run")
    assert [e["reason"] for e in result["excluded"]] == ["the client half failed; see the site's errors.log"]
    assert "ValueError: row [" in (tmp_path / "a/run/private/errors.log").read_text()


def test_runs_with_keyed_fingerprints_are_not_reported_as_of_other_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(rows(tmp_path / "a"))
    public = {key: value for key, value in tables().items() if key != "privacy"}
    for out, table in (("a", public), ("b", public | {"name": "again"}), ("c", tables()), ("d", tables())):
        fedfm.run({"name": out} | table, out)
    assert main(["compare", "a", "b", "c", "d", "--out", "page.html"]) == 0
    said = capsys.readouterr()
    for text in (said.out + said.err, (tmp_path / "a/page.html").read_text()):
        assert "different data" not in text
        assert "split among clients" not in text
        assert "cannot be compared: under [privacy] each run computes the fingerprint with its own key" in text


@pytest.mark.parametrize(
    ("asked", "states"), [({"aggregator": "secagg"}, False), ({"unit": "client", "noise_multiplier": 1.0}, True)]
)
def test_only_a_run_with_an_epsilon_states_that_the_ledger_bounds_its_files(asked, states):
    (said,) = [text for text in do_not_share(PrivacySpec(**asked), own_models=False) if "All other files" in text]
    assert ("the ledger bounds what they reveal" in said) is states
    assert ("No epsilon" in said) is not states
