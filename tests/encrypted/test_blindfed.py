"""BlindFed's orders by hand, its refusals, and the state that clients keep."""

import json

import numpy as np
import pytest
import torch

import ciphertext_student
from fedfm.cli.entry import main
from fedfm.config.experiment import Experiment
from fedfm.config.registry import resolve
from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.encrypted.inference.serialization import pack, unpack
from fedfm.encrypted.protocol import permutations
from fedfm.encrypted.protocol.client import ClientHalf
from fedfm.encrypted.protocol.handshake import Hello, spans, spans_by_part
from fedfm.errors import ClientFault, InputError
from fedfm.models.adapters.side_adapter import STATES
from fedfm.runtime.population import populate
from fedfm.training import SGD
from fedfm.training.scheduler import train_client
from small import pictures


def order(*places):
    return torch.tensor(places) - 1


def test_relative_orders_by_hand():
    pi = order(2, 3, 1), order(3, 1, 2), order(1, 3, 2)
    steps = [
        permutations.relative(pi[0], pi[1]),
        permutations.relative(pi[1], pi[2]),
        permutations.relative(pi[1], pi[0]),
    ]
    assert [(step + 1).tolist() for step in steps] == [[2, 3, 1], [2, 1, 3], [3, 1, 2]]
    lists = [torch.tensor([[10 * level + row] for row in (1, 2, 3)])[pi[level - 1]] for level in (1, 2)]
    assert [x.flatten().tolist() for x in lists] == [[12, 13, 11], [23, 21, 22]]
    # After the first step list 1 is paired with list 2.
    assert lists[0][steps[0]].flatten().tolist() == [13, 11, 12]
    assert [x.flatten().tolist() for x in permutations.to_last(lists, steps)] == [[11, 13, 12], [21, 23, 22]]
    labels = torch.tensor([1, 2, 3])
    assert labels[pi[2]].tolist() == [1, 3, 2]
    # H_0 in the order of list 1, by the way back.
    assert lists[1][steps[2]].flatten().tolist() == [22, 23, 21]


def test_orders_are_secret_fresh_and_bijective():
    drawn = [permutations.draw(20, b"k" * 32, f"client/0/{level}") for level in range(5)]
    assert len({tuple(o.tolist()) for o in drawn}) == 5
    assert torch.equal(drawn[0], permutations.draw(20, b"k" * 32, "client/0/0"))
    assert not torch.equal(drawn[0], permutations.draw(20, b"j" * 32, "client/0/0"))
    with pytest.raises(InputError, match="at least 2"):
        permutations.draw(1, b"k" * 32, "")
    for wrong in ([0, 0, 1], [1, 2, 3], [[0, 1]]):
        with pytest.raises(ClientFault, match="every row once"):
            permutations.check(torch.tensor(wrong))


def test_batches():
    assert [(s.start, s.stop) for s in spans({"train": 5, "val": 0, "test": 4}, 4)] == [(0, 4), (4, 8), (8, 9)]
    parts = spans_by_part({"train": 9, "val": 0, "test": 2}, 4)
    assert [(s.part, s.start, s.stop) for s in parts] == [
        ("train", 0, 3),
        ("train", 3, 6),
        ("train", 6, 9),
        ("test", 0, 2),
    ]
    with pytest.raises(ClientFault, match="at least 2"):
        spans_by_part({"train": 9, "val": 0, "test": 1}, 4)


def experiment(folder, method=None, **tables):
    keys = {
        "name": "blindfed",
        "foundation": str(ciphertext_student.folder(folder)),
        "encryption": "clear",
        "rounds": 2,
    }
    data = {"path": str(pictures(folder, 60)), "partition": {"name": "iid", "clients": 2}}
    return {"data": data, "method": keys | (method or {}), **tables}


@pytest.mark.parametrize(
    ("method", "tables", "reason"),
    [
        ({"protocol": "open"}, {}, "method.protocol"),
        ({"released": "everything"}, {}, "method.released"),
        ({"rank": 0}, {}, "method.rank"),
        ({"foundation": ""}, {}, "method.foundation is missing"),
        ({"labels": "loss_only"}, {}, 'belongs to protocol = "permuted"'),
        ({"labels": "loss_only", "protocol": "permuted"}, {}, "no gradient"),
        ({"released": "tokens", "protocol": "permuted"}, {}, "sends all of them"),
        (
            {"labels": "loss_only", "protocol": "permuted", "encryption": "ckks", "rounds": 0},
            {},
            "the returned labels",
        ),
        ({}, {"model": {"name": "nano-vit"}}, r"\[model\]"),
        ({}, {"run": {"engine": "deployment"}}, 'expected run.engine = "local"'),
        ({}, {"privacy": {"aggregator": "secagg"}}, "single replies"),
        ({}, {"aggregation": {"name": "secure"}}, "single replies"),
        ({}, {"attack": {"name": "label_shuffle", "fraction": 0.5}}, r"\[attack\]"),
        (
            {},
            {"privacy": {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}},
            "single clients",
        ),
    ],
)
def test_invalid_settings_are_refused(method, tables, reason, tmp_path):
    with pytest.raises(InputError, match=reason):
        Experiment.from_dict(experiment(tmp_path, method, **tables))


def test_with_ciphertexts_sums_may_be_hidden_and_noised(tmp_path):
    for more in (
        {"privacy": {"aggregator": "secagg"}},
        {"privacy": {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}},
    ):
        for protocol in ("masked", "permuted"):
            Experiment.from_dict(experiment(tmp_path, {"encryption": "ckks", "protocol": protocol}, **more))


@pytest.mark.parametrize(("foundation", "reason"), [("nano-vit", "fedfm distil"), ("nano-vut", "method.foundation")])
def test_another_foundation_is_refused_before_the_data_are_read(foundation, reason, tmp_path):
    e = Experiment.from_dict(experiment(tmp_path, {"foundation": foundation}, data={"path": "nowhere.npz"}))
    with pytest.raises(InputError, match=reason):
        populate(e)


def test_clients_do_not_receive_the_models_name(tmp_path):
    e = Experiment.from_dict(experiment(tmp_path, {"encryption": "ckks"}))
    told = e.for_clients().to_toml()
    assert "tiny-student" not in told
    assert "[model]" not in told
    again = Experiment.from_dict(__import__("tomllib").loads(told))
    assert populate(again).client_model is None
    assert again.for_server(e.server_only()).to_dict() == e.to_dict()


def hello(**more):
    told = {
        "session": "00" * 16,
        "blocks": 2,
        "positions": 1,
        "width": 3,
        "rank": 2,
        "classes": ["a", "b"],
        "kernels": "exact",
        "batch": 4,
        "tokens": 4,
        "patch": [8, 8],
        "extra": 0,
        "picture": {},
        "digest": "",
    }
    return Hello(**(told | more))


def client(n=6, tests=3):
    rng = np.random.default_rng(0)

    def rows(count):
        pixels = torch.from_numpy(rng.integers(0, 255, (count, 16, 16, 3)).astype(np.uint8))
        return Rows({"pixels": pixels}, labels=torch.arange(count) % 2)

    train, val, test = rows(n), rows(0), rows(tests)
    return Client("c", ClientData(lambda: train, lambda: val, lambda: test), None, {}, 0, trainer=train_client)


def test_a_client_keeps_its_states_by_batch_and_block():
    held, who = ClientHalf("masked", "clear"), client()
    with pytest.raises(ClientFault, match="has not sent a hello"):
        held.rows(who, 0, None, False)
    assert held.open(who, hello()).rows == {"train": 6, "val": 0, "test": 3}
    with pytest.raises(ClientFault, match="is not complete"):
        held.view(who)
    states = torch.randn(9, 2, 1, 3)
    for batch, n in ((0, 4), (1, 4), (2, 1)):
        part = states[4 * batch : 4 * batch + n]
        for block in (1, 2):
            assert held.keep(who, batch, block, part[:, block - 1 : block]) == n
    seen = held.view(who)
    assert torch.equal(seen.data.train.tensors[STATES], states[:6])
    assert torch.equal(seen.data.test.tensors[STATES], states[6:])
    assert torch.equal(seen.data.train.labels, who.data.train.labels)
    # Another process of the client reads the same.
    assert torch.equal(ClientHalf("masked", "clear").view(who).data.train.tensors[STATES], states[:6])


@pytest.mark.parametrize(
    "call",
    [
        lambda h, c: h.keep(c, 0, 1, torch.zeros(3, 1, 1, 3)),
        lambda h, c: h.keep(c, 0, 2, torch.zeros(4, 2, 1, 3)),
        lambda h, c: h.keep(c, 0, 1, torch.full((4, 1, 1, 3), float("nan"))),
        lambda h, c: h.keep(c, 3, 1, torch.zeros(4, 1, 1, 3)),
        lambda h, c: h.rows(c, 0, torch.zeros(16, dtype=torch.uint8), False),
        lambda h, c: h.refresh(c, torch.zeros(8, dtype=torch.uint8)),
        lambda h, c: h.align(c, 0, torch.zeros(3, 4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_a_client_refuses_what_does_not_fit(call):
    held, who = ClientHalf("masked", "clear"), client()
    held.open(who, hello())
    with pytest.raises(ClientFault):
        call(held, who)


def test_a_client_sends_no_rows_in_the_clear_to_a_server_that_dropped_the_encryption():
    for protocol in ("masked", "permuted"):
        with pytest.raises(ClientFault, match='encryption = "ckks"'):
            ClientHalf(protocol, "ckks").open(client(), hello())


def test_values_survive_the_store():
    value = {"a": torch.arange(6).view(2, 3), "b": torch.zeros(0)}
    found = unpack(pack(value), dict[str, torch.Tensor])
    assert torch.equal(found["a"], value["a"])
    assert found["b"].shape == (0,)


def test_blindfed_by_default_has_its_model_at_the_server():
    assert resolve("methods", "blindfed")().needs.model == "server"


def test_a_local_table_without_a_name_changes_the_methods_own_optimiser():
    def local(**keys):
        method = {"name": "blindfed", "foundation": "nano-vit-fhe", "local": keys}
        return Experiment.from_dict({"data": {"name": "digits"}, "method": method}).method.local

    assert local(epochs=3) == SGD(learning_rate=0.05, batch_size=16, epochs=3)
    assert local(name="sgd", epochs=3) == SGD(epochs=3)


def test_a_simulation_is_checked_for_what_encryption_refuses(tmp_path, capsys):
    tables = experiment(tmp_path)
    config = ciphertext_student.folder(tmp_path) / "config.json"
    told = json.loads(config.read_text())
    told["fedfm_polynomials"]["outside"] = 0.002
    config.write_text(json.dumps(told))
    (tmp_path / "exp.toml").write_text(Experiment.from_dict(tables).to_toml())
    for command in ("check", "run"):
        more = [] if command == "check" else ["--out", str(tmp_path / "run")]
        assert main([command, str(tmp_path / "exp.toml"), *more]) == 2
        assert 'tiny-student": 0.20% of the arguments' in capsys.readouterr().err
