"""run.transport: the same bits and bytes however messages travel, errors that are stated, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedfm
import small
import tiny_text
from fedfm.config.experiment import Experiment
from fedfm.core.messages import Reply, Request
from fedfm.core.transport import KEY, CodedLink, Coding
from fedfm.core.wire import codec
from fedfm.errors import ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.linalg.quantised import code, decode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save_all(tmp_path_factory.mktemp("text"))


def tables(folder: Path, method: str = "fedavg", transport: str = "float32", **run: Any) -> dict[str, Any]:
    return tiny_text.tables(folder, method, run={"transport": transport, **run})


@pytest.mark.sample("fedavg-bfloat16", "scaffold-int8")
@pytest.mark.each_value
@pytest.mark.parametrize("transport", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ditto", "fedbip"])
def test_the_same_however_messages_travel(folder: Path, tmp_path: Path, method: str, transport: str) -> None:
    if method == "scaffold":
        ways = [
            tiny_text.tables(
                folder,
                method,
                run={"transport": transport, **way},
                local={"name": "sgd", "learning_rate": 0.05, "batch_size": 8},
            )
            for way in ({}, {"wire": True}, {"workers": 2})
        ]
    else:
        ways = [tables(folder, method, transport, **way) for way in ({}, {"wire": True}, {"workers": 2})]
    found = [fedfm.run(way, tmp_path / str(i)) for i, way in enumerate(ways)]
    keys = ("params_sha256", "accuracy", "bytes_up", "bytes_down", "excluded")
    assert not found[0]["excluded"]
    assert all([other[key] for key in keys] == [found[0][key] for key in keys] for other in found[1:])
    assert all(other["details"]["transport"] == found[0]["details"]["transport"] for other in found[1:])


def test_bytes_errors_and_learning(folder: Path, tmp_path: Path) -> None:
    found = {t: fedfm.run(tables(folder, transport=t), tmp_path / t) for t in ("float32", "bfloat16", "int8")}
    exact = found["float32"]
    assert "transport" not in exact["details"]
    for name, least in (("bfloat16", 1.25), ("int8", 1.35)):  # heads of messages stay as long as they are
        told = found[name]["details"]["transport"]
        assert told["precision"] == name
        for way in ("up", "down"):
            assert exact[f"bytes_{way}"] > least * found[name][f"bytes_{way}"]
            assert 0 < told[way]["rms"] < told[way]["largest"] < 0.01
        assert found[name]["accuracy"] == pytest.approx(exact["accuracy"], abs=0.15)
    line = json.loads((tmp_path / "int8" / "metrics.jsonl").read_text().splitlines()[1])
    assert line["transport"]["down"]["largest"] == 0.0  # w_0, which the clients have
    assert line["transport"]["down"]["values"] == line["transport"]["up"]["values"] // 3  # broadcast, coded once


def test_the_up_error_is_that_of_the_updates(folder: Path, tmp_path: Path) -> None:
    """The audits' replay reads the coded updates: against those of the exact run in the first round."""
    from fedfm.audits.replay import open_finished, replay

    seen = {}
    for transport in ("float32", "int8"):
        fedfm.run(
            tables(folder, transport=transport) | {"method": {"name": "fedavg", "rounds": 1}}, tmp_path / transport
        )
        again = replay(open_finished(tmp_path / transport))
        seen[transport] = {s.client: s.value for s in again.replies if s.round == 1}
    for client, update in seen["float32"].items():
        sent = code(update.delta, "int8", None)
        assert (seen["int8"][client].delta - update.delta).norm() > 0
        near = (seen["int8"][client].delta - decode(sent.values, sent.relative)).norm()
        assert near <= 2 * (decode(sent.values, sent.relative) - update.delta).norm()


def test_a_resumed_run_is_the_same(folder: Path, tmp_path: Path) -> None:
    whole = fedfm.run(tables(folder, transport="int8"), tmp_path / "whole")
    run = tmp_path / "cut"
    fedfm.run(tables(folder, transport="int8"), run)
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"result": None}))
    for path in sorted((run / "checkpoint").iterdir())[1:]:
        path.unlink()
    again = fedfm.resume(run)
    assert again["params_sha256"] == whole["params_sha256"]
    assert again["details"]["transport"] == whole["details"]["transport"]


class _Model:
    def __init__(self, value: float = 1.0) -> None:
        self._w = Params({"m": torch.full((20, 20), value)})

    def params(self) -> Params:
        return self._w


class _Echo:
    clients = ("a", "b")

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def exchange(self, requests: Any) -> Any:
        self.requests = list(requests)
        for r in requests:
            yield Reply(r.client, {"w": r.payload["w"]}, r.round, r.call)


def test_a_broadcast_is_coded_once_and_replies_are_rebuilt() -> None:
    link, w = CodedLink(echo := _Echo(), Coding("int8", _Model())), Params({"m": torch.randn(20, 20)})  # type: ignore[arg-type]
    payload = {"w": w, "text": "x", "many": [1, 2.0, "y"]}
    replies = list(link.exchange([Request(c, "train.F_f", payload, 1, 1) for c in "ab"]))
    assert echo.requests[0].payload is echo.requests[1].payload
    assert echo.requests[0].payload["many"] == [1, 2.0, "y"]
    assert 0 < (replies[0].value["w"] - w).norm() < 0.2
    assert codec.weigh(echo.requests[0].payload) < codec.weigh(payload)
    told = link.errors()
    assert told["down"]["values"] == 400
    assert told["up"]["values"] == 800
    assert link.errors()["up"]["values"] == 0
    list(link.exchange([Request("a", "scores.Evaluation_evaluate", payload, 1, 2)]))
    assert link.errors()["down"]["values"] == 0  # evaluation is not a message of the method


def test_another_start_is_refused() -> None:
    here, there = Coding("int8", _Model(1.0)), Coding("int8", _Model(2.0))  # type: ignore[arg-type]
    sent = here.encode({"w": Params({"m": torch.full((20, 20), 1.5)})})
    with pytest.raises(ClientFault, match="E_VERSION"):
        there.rebuild(sent)
    for broken in (
        {KEY: 3},
        {KEY: {"values": 3}},
        {KEY: sent["w"][KEY].__class__(sent["w"][KEY].values, "", "", 0.0, 0.0)},
    ):
        with pytest.raises(ClientFault):
            here.rebuild({"w": broken})


def test_a_client_that_sends_nan_is_left_out_with_the_same_words(folder: Path, tmp_path: Path) -> None:
    local = {"name": "sgd", "learning_rate": 1e30, "batch_size": 8}
    reasons = []
    for i, way in enumerate(({}, {"wire": True})):
        told = tiny_text.tables(folder, "fedavg", run={"transport": "int8", **way}, local=local)
        with pytest.raises(RunError, match="0 of 3"):
            fedfm.run(told, tmp_path / str(i))
        reasons.append((tmp_path / str(i) / "manifest.json").exists())
    assert reasons == [True, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"aggregation": {"name": "secure"}}, "secure aggregation codes updates itself"),
        ({"privacy": {"unit": "client", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5}}, "exact update"),
        ({"method": {"name": "fedpft"}}, 'method.transport = "float16"'),
        ({"method": {"name": "fedbip", "transport": "bfloat16"}}, 'method.transport = "bfloat16"'),
        ({"method": {"name": "fedncm"}}, "no trained values"),
        ({"method": {"name": "zero_shot"}}, "no trained values"),
        ({"method": {"name": "centralised"}}, "sends nothing"),
        ({"run": {"transport": "int4"}}, "expected"),
    ],
)
def test_unsuitable_transports_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    base = {
        "data": {"path": str(small.features(tmp_path))},
        "model": {"name": "features"},
        "method": {"name": "fedavg"},
        "run": {"transport": "int8"},
    }
    with pytest.raises(InputError, match=why):
        Experiment.from_dict(base | change)
