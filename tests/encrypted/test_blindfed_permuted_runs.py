"""Whole runs of BlindFed's own protocol on ciphertexts with a tiny model, beside the same run in the clear.

A batch takes four CPU seconds, however few rows it has; training and test rows are two batches a client.
"""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

import ciphertext_student
import fedfm
from fedfm.api.predict import predict
from fedfm.core import storage
from fedfm.core.wire import payload
from fedfm.encrypted.inference.serialization import unpack
from fedfm.runtime.client import Silos
from small import pictures

pytest.importorskip("tenseal", reason="the extra [encrypted] is not installed")

CLIENTS = 2


def experiment(folder, encryption, *, run=None, clients=CLIENTS):
    rows = folder / "pictures.npz"
    return {
        "data": {
            "path": str(rows if rows.exists() else pictures(folder, 40)),
            "partition": {"name": "iid", "clients": clients},
        },
        "method": {
            "name": "blindfed",
            "foundation": str(ciphertext_student.folder(folder)),
            "protocol": "permuted",
            "encryption": encryption,
            "released": "grid",
            "rounds": 3,
            "local": {"learning_rate": 0.2, "epochs": 5, "batch_size": 16},
        },
        "run": {"seed": 0, "workers": 1} | (run or {}),
    }


def kept(run, client):
    """What a client keeps: states of every batch and block, orders and labels."""
    folder = run / "private" / "memory" / "+store" / client
    found = {p.name: storage.unseal(p.read_bytes()) for p in folder.iterdir()}
    states = {name: unpack(data, Tensor) for name, data in found.items() if name.startswith("turned-")}
    orders = {name: unpack(data, dict[str, Tensor]) for name, data in found.items() if name.startswith("orders-")}
    return states, orders


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, and the runs in the clear and on ciphertexts, of the same secrets; replies to the server."""
    folder, sent, results = tmp_path_factory.mktemp("permuted"), [], {}
    answer = Silos.answer

    def listening(self, requests):
        values = answer(self, requests)
        sent.extend(zip([r.handler for r in requests], values, strict=True))
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedfm.runtime.client_memory.entropy", lambda n: b"k" * n)
        results["clear"] = fedfm.run(experiment(folder, "clear"), folder / "clear")
        patch.setattr(Silos, "answer", listening)
        results["ckks"] = fedfm.run(experiment(folder, "ckks"), folder / "ckks")
    return folder, results, sent


@pytest.mark.proof
def test_clients_get_the_same_in_the_same_orders_as_in_the_clear(runs):
    folder, _, _ = runs
    for client in ("client-00", "client-01"):
        (clear, known), (states, orders) = kept(folder / "clear", client), kept(folder / "ckks", client)
        assert sorted(states) == sorted(clear) == [f"turned-{b}-{level}" for b in (0, 1) for level in (1, 2)]
        for name, want in clear.items():
            assert states[name].dtype == want.dtype
            torch.testing.assert_close(states[name], want, atol=2e-3, rtol=0)
            assert float(want.std()) > 0.1
        assert any(not torch.equal(want.argsort(0)[:, 0, 0], torch.arange(len(want))) for want in clear.values())
        for name, want in known.items():
            assert torch.equal(orders[name]["relative"], want["relative"])
            assert torch.equal(orders[name]["labels"], want["labels"])


@pytest.mark.proof
def test_a_run_on_ciphertexts_learns_as_one_in_the_clear(runs):
    _, results, _ = runs
    result, details = results["ckks"], results["ckks"]["details"]
    assert result["excluded"] == []
    assert result["accuracy"] == details["accuracy_clear"] == results["clear"]["accuracy"] > 0.8
    assert 0 < details["max_error"] < 1e-2
    assert details["encrypted_rows"] == 40
    assert 0 < details["statistical_distance"] < 2.0**-40
    assert details["ciphertext_bytes"] > 1000


@pytest.mark.proof
def test_rows_and_labels_reach_the_server_as_ciphertexts_only(runs):
    folder, _, sent = runs
    lines = [json.loads(line) for line in (folder / "ckks" / "messages.jsonl").read_text().splitlines()]
    forms = {c["handler"]: c["form"] for c in lines if c["to"] == "server" and c["handler"].startswith("query.")}
    names = ("open", "labelled", "refresh", "turn", "align")
    assert forms == {f"query.BlindFed_{name}": "encrypted" for name in names} | {
        k: v for k, v in forms.items() if "BlindFed" not in k
    }
    labels = np.load(folder / "pictures.npz")["y"]
    _, orders = kept(folder / "clear", "client-00")
    known = orders["orders-0"]["labels"].numpy()  # of a batch, in the server's last order
    came = [v for handler, v in sent if handler.endswith("_labelled")]
    assert len(came) == 4
    for value in came:
        assert {x.dtype for x in value.values()} == {torch.uint8}
        data = b"".join(map(bytes, payload.encode(value)[1]))
        for kind in ("u1", "<i8", "<f4", "<f8"):
            assert known.astype(kind).tobytes() not in data
        # Bytes of ciphertexts: no value is much more frequent than others.
        assert np.bincount(np.frombuffer(data, np.uint8), minlength=256).max() < 1.2 * len(data) / 256
    assert len(set(labels)) > 1


@pytest.mark.proof
def test_predictions_go_by_the_same_protocol(runs, tmp_path):
    folder, _, _ = runs
    rows = np.load(folder / "pictures.npz")
    for n in (5, 1):
        few = {name: rows[name][:n] if name != "classes" else rows[name] for name in rows.files}
        np.savez(tmp_path / "few.npz", **few)
        if n == 1:
            with pytest.raises(fedfm.errors.InputError, match="needs at least 2"):
                predict(folder / "ckks", tmp_path / "few.npz")
        else:
            found = predict(folder / "ckks", tmp_path / "few.npz")
            assert np.mean(np.array(found["predictions"]) == rows["classes"][rows["y"][:n]]) >= 0.8


class Killed(BaseException):
    """Ends a process as a signal does: nothing of its memory is left."""


@pytest.mark.release
def test_a_killed_run_goes_on_at_its_block(runs, tmp_path, monkeypatch):
    folder, _, _ = runs
    answer, asked = Silos.answer, []

    def dying(self, requests):
        name = requests[0].handler.rpartition("_")[2]
        if name == "turn":
            asked.append((requests[0].payload["batch"], requests[0].payload["block"]))
            if asked[-1][1] == 2:
                raise Killed
        return answer(self, requests)

    tables = experiment(folder, "ckks", clients=1)
    tables["method"] |= {"processes": 1}
    monkeypatch.setattr(Silos, "answer", dying)
    with pytest.raises(Killed):
        fedfm.run(tables, tmp_path / "run")
    assert asked == [(0, 1), (0, 2)]
    store = tmp_path / "run" / "private" / "memory" / "+store" / "client-00" / "turned-0-1"
    before = store.read_bytes()
    monkeypatch.setattr(Silos, "answer", lambda self, r: note(r) or answer(self, r))
    again = []

    def note(requests):
        if requests[0].handler.endswith("_turn"):
            again.append((requests[0].payload["batch"], requests[0].payload["block"]))

    result = fedfm.resume(tmp_path / "run")
    assert store.read_bytes() == before
    assert again == [(0, 2), (1, 1), (1, 2)]  # the first block did not come again
    assert result["excluded"] == []
    assert result["accuracy"] == result["details"]["accuracy_clear"] > 0.8
    assert result["details"]["encrypted_rows"] == 40


@pytest.mark.release
def test_deployed_it_learns(tmp_path):
    """One client, since every refresh is a message: its two batches take some two hundred."""
    tables = experiment(tmp_path, "ckks", run={"engine": "deployment", "workers": 0}, clients=1)
    result = fedfm.run(tables, tmp_path / "run")
    assert result["accuracy"] > 0.8
    assert result["excluded"] == []
    assert result["details"]["encrypted_rows"] == 40
