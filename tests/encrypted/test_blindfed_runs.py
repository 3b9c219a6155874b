"""Whole runs of BlindFed: in the clear, and on ciphertexts with a tiny model; killed ones, and what crossed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch

import ciphertext_student
import fedfm
from fedfm.api.join import join
from fedfm.api.predict import export, load, predict
from fedfm.core.wire import payload
from fedfm.runtime.client import Silos
from small import pictures

CLIENTS = 3


def experiment(folder, *, run=None, limit=60, clients=CLIENTS, **method):
    keys = {"name": "blindfed", "foundation": str(ciphertext_student.folder(folder)), "rounds": 3, "released": "grid"}
    local = {"learning_rate": 0.2, "epochs": 5, "batch_size": 16}
    rows = folder / "pictures.npz"
    return {
        "data": {
            "path": str(rows if rows.exists() else pictures(folder, limit)),
            "partition": {"name": "iid", "clients": clients},
        },
        "method": keys | {"local": local} | method,
        "run": {"seed": 0, "workers": 1} | (run or {}),
    }


def crossings(folder):
    return [json.loads(line) for line in (folder / "messages.jsonl").read_text().splitlines()]


SAME = ("params_sha256", "accuracy", "client_accuracy", "bytes_up", "bytes_down")


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clear")
    tables = experiment(folder, encryption="clear")
    return folder, tables, fedfm.run(tables, folder / "run")


def test_a_run_in_the_clear_learns_and_states_that_it_is_a_simulation(clear):
    folder, _, result = clear
    assert result["accuracy"] > 0.9  # a quarter is guessing
    assert result["details"]["accuracy_clear"] == result["accuracy"]
    assert any("simulation" in text for text in fedfm.load_run(folder / "run").manifest["notices"])
    assert {c["form"] for c in crossings(folder / "run")} == {"plain"}


@pytest.mark.proof
def test_the_learning_rate_falls_as_in_the_paper_by_default(clear, tmp_path):
    _, tables, result = clear
    method = tables["method"]

    def run(name, schedule, **keys):
        local = method["local"] | {"schedule": schedule}
        return fedfm.run(tables | {"method": method | keys | {"local": local}}, tmp_path / name)["params_sha256"]

    explicit = run("steps", "steps", drops=False)
    assert result["params_sha256"] == explicit
    assert run("linear", "linear") == run("linear too", "linear", drops=False) != explicit
    assert run("constant", "constant", drops=False) != explicit


class Killed(BaseException):
    """Ends a process as a signal does: nothing of its memory is left."""


@pytest.mark.sample("masked")
@pytest.mark.parametrize("protocol", ["masked", "permuted"])
def test_a_run_that_is_killed_between_batches_goes_on_there(protocol, clear, tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)  # the same orders in both runs
    monkeypatch.setattr("fedfm.encrypted.protocol.server.SLOTS", 64)  # 16 rows a batch
    tables = experiment(clear[0], encryption="clear", protocol=protocol)
    straight = fedfm.run(tables, tmp_path / "straight")
    answer, asked = Silos.answer, []

    def dying(self, requests):
        if requests[0].handler.endswith(("_keep", "_align")):
            asked.append(requests[0].payload["batch"])
            if len(asked) == CLIENTS + 1:
                raise Killed
        return answer(self, requests)

    monkeypatch.setattr(Silos, "answer", dying)
    with pytest.raises(Killed):
        fedfm.run(tables, tmp_path / "killed")
    resumed = fedfm.resume(tmp_path / "killed")
    assert {key: resumed[key] for key in ("params_sha256", "accuracy", "client_accuracy")} == {
        key: straight[key] for key in ("params_sha256", "accuracy", "client_accuracy")
    }
    assert asked.count(0) == CLIENTS  # what was kept did not come again
    # What had crossed is listed and counted: a resumed run opens again, and asks again for the batch under way.
    whole, twice = ([c for c in crossings(tmp_path / name) if c["round"] == 0] for name in ("straight", "killed"))
    again = {"masked": {"rows": CLIENTS}, "permuted": {"labelled": 1, "turn": 2}}[protocol]
    counts = [Counter(c["handler"].rpartition("_")[2] for c in log if c["to"] == "server") for log in (whole, twice)]
    assert counts[1] - counts[0] == Counter(again | {"open": CLIENTS})
    assert counts[0] - counts[1] == Counter()
    for way, to_server in (("bytes_up", True), ("bytes_down", False)):
        listed = [
            c["bytes"] for c in crossings(tmp_path / "killed") if c["counted"] and (c["to"] == "server") is to_server
        ]
        assert resumed[way] == sum(listed) > straight[way]


def test_no_label_reaches_the_server_and_the_paper_s_protocol_sends_them(clear, tmp_path, monkeypatch):
    folder = clear[0]
    sent = {}

    def listening(self, requests):
        values = answer(self, requests)
        for request, value in zip(requests, values, strict=True):
            name = request.handler.rpartition("_")[2]
            sent.setdefault(name, []).append(b"".join(map(bytes, payload.encode(value)[1])))
        return values

    answer = Silos.answer
    monkeypatch.setattr(Silos, "answer", listening)
    rows = np.load(folder / "pictures.npz")
    found = {}
    for protocol in ("masked", "permuted"):
        sent.clear()
        fedfm.run(experiment(folder, encryption="clear", protocol=protocol), tmp_path / protocol)
        run = fedfm.load_run(tmp_path / protocol)
        from fedfm.runtime.population import populate

        clients = populate(run.experiment).federated.clients
        labels = [rows["y"][index.train].astype("<i8").tobytes() for index in clients.values()]
        found[protocol] = sorted(name for name, data in sent.items() if any(y in d for y in labels for d in data))
    assert found["masked"] == []
    assert found["permuted"] == ["labelled"]


def test_one_finished_run_predicts_takes_a_newcomer_and_is_exported(clear, tmp_path):
    folder, _, _ = clear
    run = folder / "run"
    rows = np.load(folder / "pictures.npz")
    found = predict(run, folder / "pictures.npz")
    right = np.array(found["predictions"]) == rows["classes"][rows["y"]]
    assert right.mean() > 0.9
    late = join(run, folder / "pictures.npz")
    assert late["accuracy"] > 0.8
    export(run, "torch", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "fedfm.json").read_text())["adaptation"] == "side_adapter"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "disclosed activations" in card
    assert "## Privacy" in card
    names = {}
    exec(card.split("```python\n")[1].split("```")[0].replace("FOLDER", str(tmp_path / "out")), names)
    _, model, w = load(run)
    model.load(w)
    states = torch.randn(4, *model.net.shape)
    torch.testing.assert_close(names["model"](states), model.net(states))


# --- on ciphertexts ---------------------------------------------------------------------------------------------------

pytest.importorskip("tenseal", reason="the extra [encrypted] is not installed")


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory, clear):
    """A run of three clients under secure aggregation."""
    folder = tmp_path_factory.mktemp("encrypted")
    tables = experiment(clear[0], encryption="ckks") | {"privacy": {"aggregator": "secagg"}}
    return folder, fedfm.run(tables, folder / "run")


@pytest.mark.proof
def test_on_ciphertexts_it_learns_the_same(encrypted, clear):
    result, details = encrypted[1], encrypted[1]["details"]
    assert result["excluded"] == []
    assert abs(result["accuracy"] - details["accuracy_clear"]) <= 0.05  # 12 test rows
    assert abs(result["accuracy"] - clear[2]["accuracy"]) <= 0.05
    assert 0 < details["max_error"] < 1e-2
    assert details["encrypted_rows"] == 60
    assert 0 < details["statistical_distance"] < 2.0**-40
    assert details["ciphertext_bytes"] > 1000
    assert details["seconds_per_sample"] > 0


@pytest.mark.proof
def test_nothing_large_reaches_the_server_in_the_clear(encrypted):
    found = crossings(encrypted[0] / "run")
    assert {c["form"] for c in found if c["to"] == "server" and c["bytes"] > 20_000} <= {"encrypted", "masked"}
    forms = {(c["handler"], c["to"] == "server"): c["form"] for c in found}
    assert forms["query.BlindFed_refresh", False] == forms["query.BlindFed_refresh", True] == "encrypted"
    assert forms["query.BlindFed_keep", False] == "encrypted"
    assert forms["train.BlindFed_train", True] == "masked"


@pytest.mark.proof
def test_the_secret_key_stays_with_its_client(encrypted):
    private = encrypted[0] / "run" / "private"
    key = (private / "memory" / "+store" / "client-00" / "ckks").read_bytes()[-4096:]
    holders = [p for p in private.rglob("*") if p.is_file() and key in p.read_bytes()]
    assert [p.relative_to(private).parts[:3] for p in holders] == [("memory", "+store", "client-00")]
    assert all(p.stat().st_mode & 0o077 == 0 for p in private.rglob("*") if p.is_file() and p.name != "lock")


@pytest.mark.proof
def test_predictions_of_an_encrypted_run_go_by_ciphertexts(encrypted, clear, tmp_path):
    rows = np.load(clear[0] / "pictures.npz")
    few = {name: rows[name][:5] if name != "classes" else rows[name] for name in rows.files}
    np.savez(tmp_path / "few.npz", **few)
    found = predict(encrypted[0] / "run", tmp_path / "few.npz")
    assert len(found["predictions"]) == 5
    assert np.mean(np.array(found["predictions"]) == rows["classes"][rows["y"][:5]]) >= 0.8


@pytest.mark.proof
def test_a_newcomer_s_rows_pass_by_ciphertexts_too(encrypted, clear, tmp_path, monkeypatch):
    from fedfm.encrypted.protocol import masked
    from fedfm.models.adapters.side_adapter import SideModel

    secrets, received = [], []

    class Newcomer(masked.KeyHolder):
        @classmethod
        def new(cls, *told):
            secrets.append(super().new(*told))
            return secrets[-1]

    class Watched(masked.ModelOwner):
        def __init__(self, folded, released, public, session, key, ledger, **more):
            received.append(public + session + key)
            super().__init__(folded, released, public, session, key, ledger, **more)

        def run(self, rows, exchange, release, *more):
            def watched(message):
                received.append(exchange(message))
                return received[-1]

            received.append(rows)
            super().run(rows, watched, release, *more)

    def in_the_clear(*_):
        raise AssertionError("rows passed the model in the clear")

    monkeypatch.setattr(masked, "KeyHolder", Newcomer)
    monkeypatch.setattr(masked, "ModelOwner", Watched)
    monkeypatch.setattr(SideModel, "states", in_the_clear)
    monkeypatch.setattr(SideModel, "blocks", in_the_clear)
    found = join(encrypted[0] / "run", clear[0] / "pictures.npz")
    assert found["accuracy"] > 0.8
    assert len(secrets) == 2  # training and test rows
    got = b"".join(received)
    assert len(received) > 10
    for holder in secrets:
        assert holder.to_bytes()[-64:] not in got


START = """
import sys, tomllib, fedfm, pathlib
fedfm.run(pathlib.Path(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.proof
def test_a_killed_encrypted_run_goes_on_at_its_block(encrypted, clear, tmp_path):
    from fedfm.config.experiment import Experiment

    tables = experiment(clear[0], encryption="ckks")
    (tmp_path / "exp.toml").write_text(Experiment.from_dict(tables).to_toml())
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(tmp_path / "exp.toml"), str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    store, deadline = tmp_path / "run" / "private" / "+store" / "server", time.monotonic() + 300
    while not list(store.glob("states-*")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    name = min(path.name for path in store.glob("states-*"))
    client, batch = name.removeprefix("states-").rsplit("-", 1)  # clients take turns, so any of them may be the first
    kept = tmp_path / "run" / "private" / "memory" / "+store" / client / f"states-{batch}-1"
    before = kept.read_bytes()
    result = fedfm.resume(tmp_path / "run")
    assert result["rounds"] == 3
    assert result["excluded"] == []
    assert abs(result["accuracy"] - encrypted[1]["accuracy"]) <= 0.05
    assert kept.read_bytes() == before  # the first block did not come again
    assert not list(store.glob("states-*"))
    assert result["details"]["encrypted_rows"] == 60
    found = [c for c in crossings(tmp_path / "run") if c["to"] == "server" and c["counted"]]
    assert sum(c["bytes"] for c in found) == result["bytes_up"]
    assert sum(c["handler"] == "query.BlindFed_open" for c in found) == CLIENTS  # before the kill, and not again
    refreshes = sum(c["handler"] == "query.BlindFed_refresh" for c in found)
    assert refreshes >= encrypted[1]["details"]["refreshes"]


@pytest.mark.deployment
def test_a_deployed_run_is_as_accurate_and_sites_get_no_model_name(clear, tmp_path):
    """The simulation runs two clients at a time."""
    local = fedfm.run(experiment(clear[0], encryption="clear", clients=2), tmp_path / "local")
    run = {"engine": "deployment", "workers": 0}
    tables = experiment(clear[0], encryption="ckks", clients=2, processes=2, run=run)
    result = fedfm.run(tables, tmp_path / "run")
    assert abs(result["accuracy"] - local["accuracy"]) <= 0.05
    assert result["excluded"] == []
    told = [p.read_text() for p in (tmp_path / "run" / "private" / "deployment").rglob("site.json")]
    assert len(told) == 2
    assert all("tiny-student" not in text and "[model]" not in text for text in told)
