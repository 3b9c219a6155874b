"""FlowerLink and Site over an in-process Grid: same bits and bytes as the local engine, and replies that are wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp

import tiny_clip
from fedfm import __version__
from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.config.run_spec import RunSpec
from fedfm.core.client import Client, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.wire import codec, payload
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.app_writer import experiment_text
from fedfm.engines.flower.client_host import ClientHost, of_folder
from fedfm.engines.flower.link import FlowerLink
from fedfm.engines.flower.private_api import error_codes, identity, serialised_nbytes
from fedfm.engines.flower.server_app import host
from fedfm.engines.flower.simulation import reply
from fedfm.engines.interruption import Interrupted
from fedfm.errors import ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.scaffold import Scaffold
from fedfm.privacy.exposure import HELLO
from fedfm.runtime.run_directory import Run
from fedfm.training import SGD
from grid import InProcessGrid
from small import experiment
from toy import Toys, federation, run

ROWS = {"a": [1.0], "b": [2.0, 3.0], "c": [-1.0]}


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


class App(ClientApp):
    """One client's site, as in a Ray actor."""

    def __init__(self, site: ClientHost, name: str) -> None:
        super().__init__()
        self.site, self.name = site, name

    def __call__(self, message, context):
        return reply(self.site, self.name, message)


def sites(method, folder, rows=ROWS, **more):
    """A node a client, in the wrong order of names."""
    apps = {}
    for number, name in enumerate(sorted(rows, reverse=True)):
        toys = Toys({name: rows[name]})
        toys.model.identity = "f" * 64
        experiment = SimpleNamespace(method=method, aggregation=Aggregator(), run=RunSpec(), privacy=None)
        site = ClientHost(lambda e=experiment: e, folder / name, lambda experiment, classes, t=toys: t, **more)
        apps[100 + number] = App(site, name)
    return apps


def over_flower(method, folder, mischief=lambda request, reply: [reply], rows=ROWS, site=None, **link):
    grid = InProcessGrid(sites(method, folder, rows, **(site or {})), mischief)
    link = FlowerLink(grid, **{"timeout": 0.4, "expected": sorted(rows), **link})
    return Federation(link, model=Toys(rows).model, aggregator=Aggregator()), grid


@pytest.mark.parametrize(
    "method", [FedAvg(local=SGD(epochs=2, batch_size=2)), Scaffold(local=SGD(batch_size=2), fraction=0.7)]
)
def test_same_bits_and_bytes_as_the_local_engine(tmp_path, method):
    local = federation(method, ROWS, tmp_path / "local", workers=1)
    ours, grid = over_flower(method, tmp_path / "flower")
    a, b = run(method, local, 3)[-1], run(method, ours, 3)[-1]
    assert method.params_for(a, "").sha256() == method.params_for(b, "").sha256()
    assert (local.transcript.bytes_up, local.transcript.bytes_down) == (
        ours.transcript.bytes_up,
        ours.transcript.bytes_down,
    )
    assert local.transcript.bytes_down == sum(
        serialised_nbytes(m.content) for m in grid.sent if m.metadata.message_type != HELLO
    )


@dataclass(frozen=True)
class Hearing(FedAvg):
    """Every client is told something else."""

    asks: ClassVar[tuple[str, ...]] = ("hear",)

    @on_client
    def hear(self, client: Client, word: str) -> Update:
        return Update(Params({"w": torch.tensor([float(len(word))])}), 1.0, {})


def test_messages_of_different_lengths_are_counted_one_by_one(tmp_path):
    method, words = Hearing(), each({c: "x" * 10**i for i, c in enumerate(sorted(ROWS))})
    local, (ours, _) = federation(method, ROWS, tmp_path / "local"), over_flower(method, tmp_path / "flower")
    down = []
    for fed in (local, ours):
        assert len(fed.ask(method.hear, word=words)) == len(ROWS)
        down.append(fed.transcript.bytes_down)
    assert down[0] == down[1] > 100


def test_clients_are_ordered_by_name_and_a_broadcast_is_encoded_once(tmp_path):
    fed, grid = over_flower(FedAvg(), tmp_path)
    assert fed.clients == ("a", "b", "c")
    run(FedAvg(), fed, 1)
    sent = [m for m in grid.sent if m.metadata.message_type == "train.FedAvg_train"]
    assert len({id(m.content) for m in sent}) == 1
    assert {m.metadata.message_type for m in grid.sent} == {HELLO, "train.FedAvg_train"}
    assert [(c.sender, c.receiver) for c in fed._link.hellos][:2] == [("server", "c"), ("c", "server")]


UNAVAILABLE = "ActorUnavailableError:<'The actor is temporarily unavailable: IOError: The actor is restarting.'>"


def crooked(name, make):
    """Mischief of one client's training replies; hello stays honest."""

    def mischief(request, reply):
        mine = request.metadata.dst_node_id == 100 + sorted(ROWS, reverse=True).index(name)
        return make(request, reply) if mine and request.metadata.message_type != HELLO else [reply]

    return mischief


def _content(request, record):
    return [Message(record, reply_to=request)]


def _envelope(request, reply, **change):
    value = codec.from_record(reply.content, None)
    return _content(request, codec.to_record({**value, **change}))


BAD = {
    "no fedfm payload": (lambda q, r: _content(q, RecordDict({"x": ConfigRecord({"y": 1})})), "E_FORMAT"),
    "no array": (lambda q, r: _content(q, RecordDict({"data": ArrayRecord(), "head": ConfigRecord()})), "E_FORMAT"),
    "no envelope": (lambda q, r: _content(q, codec.to_record([1, 2])), "E_FORMAT"),
    "no body": (lambda q, r: _content(q, codec.to_record({"round": 1, "call": 1, "more": 0})), "E_FORMAT"),
    "a round that is not a number": (lambda q, r: _envelope(q, r, round="1"), "E_FORMAT"),
    "another round": (lambda q, r: _envelope(q, r, round=7), "E_ROUND"),
    "not an update": (lambda q, r: _envelope(q, r, body=3.0), "E_FIELD"),
    "a weight of nothing": (lambda q, r: _envelope(q, r, body={**_body(r), "weight": 0.0}), "E_WEIGHT"),
    "not a number": (lambda q, r: _envelope(q, r, body={**_body(r), "weight": float("nan")}), "E_NONFINITE"),
    "an error": (lambda q, r: [Message(Error(2, "ValueError: no"), reply_to=q)], "E_EXCEPTION"),
    "a node that is gone": (lambda q, r: [_from_superlink(q)], "E_DIED"),
    "a fault": (lambda q, r: _content(q, codec.to_record(_fault("E_REFUSED", "no"))), "E_REFUSED"),
    "a fault that only the server finds": (
        lambda q, r: _content(q, codec.to_record(_fault("E_READONLY", "no"))),
        "E_EXCEPTION",
    ),
    "a fault that is none": (
        lambda q, r: _content(q, codec.to_record({"round": 1, "call": 1, "fault": 3})),
        "E_FORMAT",
    ),
    "silence": (lambda q, r: [], "E_TIMEOUT"),
}


def _body(reply):
    return codec.from_record(reply.content, None)["body"]


def _fault(code, reason):
    return {"round": 1, "call": 1, "fault": {"code": code, "reason": reason}}


def _from_superlink(request):
    """As the SuperLink replies in the place of a dead node: its own node id, 1."""
    message = Message(Error(5, "node unavailable"), reply_to=request)
    message.metadata.__dict__["_src_node_id"] = 1
    return message


@pytest.mark.parametrize("what", BAD)
def test_a_bad_reply_leaves_its_client_out_and_changes_nothing_else(tmp_path, what):
    make, code = BAD[what]
    fed, _ = over_flower(FedAvg(), tmp_path / "bad", crooked("b", make))
    state = run(FedAvg(), fed, 1)[-1]
    without = federation(FedAvg(), {k: v for k, v in ROWS.items() if k != "b"}, tmp_path / "without", workers=1)
    assert code in [e.code for e in fed.excluded]
    assert {e.client for e in fed.excluded} == {"b"}
    assert state.sha256() == run(FedAvg(), without, 1)[-1].sha256()


@pytest.mark.parametrize(
    "error",
    [
        Error(error_codes().CLIENT_APP_CRASHED, "ended"),
        Error(error_codes().UNKNOWN, "ray.exceptions.ActorDiedError: gone"),
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_a_process_that_ended_is_asked_once_more(tmp_path, error, times):
    left = [error] * times
    crashes = crooked("b", lambda q, r: [Message(left.pop(), reply_to=q)] if left else [r])
    fed, _ = over_flower(Scaffold(), tmp_path / "ended", crashes)
    state = run(Scaffold(), fed, 3)[-1]
    if times == 2:
        assert [(e.round, e.client, e.code) for e in fed.excluded] == [(1, "b", "E_DIED")]
        return
    assert fed.excluded == []
    whole, _ = over_flower(Scaffold(), tmp_path / "whole")
    assert (
        Scaffold().params_for(state, "b").sha256() == Scaffold().params_for(run(Scaffold(), whole, 3)[-1], "b").sha256()
    )


def test_a_process_that_is_not_back_yet_is_waited_for(tmp_path, monkeypatch):
    died, back = (Error(error_codes().UNKNOWN, f"ray.exceptions.{why}") for why in ("ActorDiedError", UNAVAILABLE))
    left = [died, back, back]
    crashes = crooked("b", lambda q, r: [Message(left.pop(0), reply_to=q)] if left else [r])
    fed, _ = over_flower(FedAvg(), tmp_path / "ended", crashes)
    run(FedAvg(), fed, 1)
    assert fed.excluded == []
    assert left == []
    monkeypatch.setattr("fedfm.engines.flower.link._RESTART", 0.0)
    never = crooked("b", lambda q, r: [Message(back, reply_to=q)])
    fed, _ = over_flower(FedAvg(), tmp_path / "never", never)
    run(FedAvg(), fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_DIED")]


def test_a_second_reply_is_reported_and_not_counted(tmp_path):
    twice = crooked("b", lambda q, r: [r, Message(r.content, reply_to=q)])
    fed, _ = over_flower(FedAvg(), tmp_path / "twice", twice)
    once, _ = over_flower(FedAvg(), tmp_path / "once")
    assert run(FedAvg(), fed, 1)[-1].sha256() == run(FedAvg(), once, 1)[-1].sha256()
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_DUPLICATE")]


def test_a_node_cannot_speak_for_another(tmp_path):
    def forged(request, reply):
        reply.metadata.__dict__["_src_node_id"] = 102
        return [reply]

    fed, _ = over_flower(FedAvg(), tmp_path, crooked("b", forged))
    run(FedAvg(), fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_TIMEOUT")]


@dataclass(frozen=True)
class Loud(FedAvg):
    """A client half that fails."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        client.memory["seen"] = 1.0
        raise ValueError("no such thing as row 17")


def test_an_exception_comes_back_as_a_fault_and_its_traceback_stays(tmp_path):
    kept = []
    fed, _ = over_flower(Loud(), tmp_path, site={"on_error": lambda client, text: kept.append((client, text))})
    with pytest.raises(RunError):
        run(Loud(), fed, 1)
    assert {e.code for e in fed.excluded} == {"E_EXCEPTION"}
    assert fed.excluded[0].reason == "ValueError: no such thing as row 17"
    assert "Traceback" in kept[0][1]
    assert "Traceback" not in fed.excluded[0].reason
    assert not list(tmp_path.rglob("*.safetensors"))


def hello(**change):
    """Mischief of one node's hello."""

    def mischief(request, reply):
        if request.metadata.message_type != HELLO or request.metadata.dst_node_id != 101:
            return [reply]
        return _envelope(request, reply, body={**_body(reply), **change})

    return mischief


@pytest.mark.parametrize("change", [{"fedfm": "0.0.1"}, {"wire": 99}, {"model": "0" * 64}])
def test_another_version_or_model_is_left_out(tmp_path, change):
    notices = []
    fed, _ = over_flower(FedAvg(), tmp_path, hello(**change), identity="f" * 64, notice=notices.append)
    run(FedAvg(), fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_VERSION")]
    assert len(notices) == 1
    assert "b does not take part" in notices[0]


def test_two_nodes_of_one_name_are_both_left_out_where_no_key_is_registered_under_it(tmp_path):
    notices = []
    fed, _ = over_flower(FedAvg(), tmp_path, hello(name="a"), notice=notices.append)
    run(FedAvg(), fed, 1)
    assert {e.client for e in fed.excluded} == {"a", "b"}
    assert [n for n in notices if 'E_CLIENT: its silo.toml says name = "a", as another node' in n] == notices[:2]


def test_a_stranger_does_not_take_part_and_too_few_do_not_begin(tmp_path):
    fed, _ = over_flower(FedAvg(), tmp_path / "1", hello(name="mallory"))
    run(FedAvg(), fed, 1)
    assert [(e.client, e.code) for e in fed.excluded] == [("b", "E_DIED")]
    with pytest.raises(RunError, match="2 of 3 connected nodes"):
        over_flower(FedAvg(), tmp_path / "2", hello(name="mallory"), min_clients=3)


def test_silos_with_rows_of_their_own_bring_their_own_names(tmp_path):
    def named(request, reply):
        if request.metadata.message_type != HELLO:
            return [reply]
        return _envelope(
            request, reply, body={**_body(reply), "name": f"n{request.metadata.dst_node_id}", "own_data": True}
        )

    fed, _ = over_flower(FedAvg(), tmp_path, named)
    assert fed.clients == ("n100", "n101", "n102")


@pytest.mark.proof
def test_silos_with_policies_of_their_own(tmp_path):
    """Means are allowed by both; scores by one, and the server is told who refused what."""
    tables = experiment(tmp_path, method={"name": "fedavg", "fraction": 1.0, "rounds": 2})
    tables["data"]["partition"] = {"name": "iid", "clients": 2}
    demanded = Experiment.from_dict(tables | {"run": {"engine": "simulation", "timeout": 5.0}})
    policies = {"north": ["mean", "scores"], "south": ["mean"]}
    apps = {}
    for number, (name, allow) in enumerate(policies.items()):
        site, own = silo_site(tmp_path / name, name, demanded, allow=allow, data=tables["data"]["path"])
        apps[100 + number] = App(site, own)
    result = host(Run.create(demanded, tmp_path / "run"), InProcessGrid(apps))
    assert result["excluded"] == []
    assert result["client_accuracy"]["north"] is not None
    assert result["client_accuracy"]["south"] is None
    assert "scores.Evaluation_evaluate is not answered: E_REFUSED" in (tmp_path / "south/.fedfm/silo.log").read_text()


def silo_site(folder, name, demanded, **keys):
    """A silo's site, as its worker builds it, and its name."""
    folder.mkdir()
    lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, **keys}.items()]
    (folder / "silo.toml").write_text("\n".join(lines))
    config, node = {"experiment": experiment_text(demanded), "key": "k"}, {"silo": str(folder / "silo.toml")}
    return of_folder(client_stub.admit(config, node, 1))


def test_a_silo_with_rows_of_its_own_never_attacks_on_demand(tmp_path):
    tables = experiment(tmp_path, method={"name": "fedavg", "fraction": 1.0})
    tables["data"]["partition"] = {"name": "iid", "clients": 2}
    tables |= {"attack": {"name": "sign_flip", "fraction": 0.5}, "run": {"engine": "simulation", "timeout": 5.0}}
    demanded = Experiment.from_dict(tables)
    apps = {}
    for number, name in enumerate(("north", "south")):
        site, own = silo_site(tmp_path / name, name, demanded, data=tables["data"]["path"])
        apps[100 + number] = App(site, own)
    with pytest.raises(InputError, match="silos with their own rows cannot be attackers"):
        host(Run.create(demanded, tmp_path / "run"), InProcessGrid(apps))


def test_a_silo_with_rows_of_its_own_trains_on_all_its_classes(tmp_path):
    model, rows = tiny_clip.save("clip", tmp_path / "clip"), tiny_clip.pictures(tmp_path / "rows.npz")
    tables = {
        "data": {"path": str(rows), "partition": {"name": "iid", "clients": 1}},
        "model": {"name": str(model), "task": "zero_shot", "base_classes": 2},
        "method": {"name": "fedavg", "rounds": 1},
        "run": {"engine": "simulation", "timeout": 5.0},
    }
    demanded = Experiment.from_dict(tables)
    site, own = silo_site(tmp_path / "north", "north", demanded, data=str(rows), models=[str(model)])
    with pytest.raises(InputError, match=r"model\.base_classes: silos with their own rows train on all classes"):
        host(Run.create(demanded, tmp_path / "run"), InProcessGrid({100: App(site, own)}))


def test_stop_is_heeded_while_waiting(tmp_path):
    asked = []
    silent = crooked("b", lambda q, r: [])
    fed, _ = over_flower(FedAvg(), tmp_path, silent, stop=lambda: len(asked) > 0, timeout=30.0)
    asked.append(1)
    with pytest.raises(Interrupted):
        run(FedAvg(), fed, 1)


def test_a_late_reply_is_dropped(tmp_path):
    held = []

    def slow(request, reply):
        if not held:
            held.append(reply)
            return []
        return [reply]

    fed, grid = over_flower(FedAvg(), tmp_path, crooked("b", slow))
    fed.begin(1)
    w = FedAvg().step(fed, fed.initial, 1)
    assert fed._link.straggling
    grid._replies.append(held[0])
    fed.begin(2)
    FedAvg().step(fed, w, 2)
    assert [(e.round, e.client, e.code) for e in fed.excluded] == [(1, "b", "E_TIMEOUT")]
    assert not fed._link.straggling


# --- the thin stub ---------------------------------------------------------------------------------------------------


def test_the_apps_import_neither_torch_nor_transformers():
    code = "import sys, fedfm.engines.flower.apps; sys.exit(bool({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_fault_made_without_the_wire_module_reads_like_one_made_with_it():
    head, pieces = payload.encode(codec.envelope(7, 3, {"w": Params({})}))
    text, data = client_stub.fault_halves(ClientFault("E_DIED", 'gone "away"'), head, b"".join(pieces))
    assert payload.decode(text, data, None) == {
        "round": 7,
        "call": 3,
        "fault": {"code": "E_DIED", "reason": 'gone "away"'},
    }
    assert payload.decode(*client_stub.fault_halves(ClientFault("E_FORMAT", "x"), "[", b""), None)["round"] == 0


def test_a_site_has_one_folder_a_run_whatever_its_name(tmp_path):
    node = {"site": str(tmp_path), "client": "../../etc"}
    place = client_stub.folder_of({"key": "../k"}, node, 5)
    assert place.resolve().is_relative_to(tmp_path)
    assert client_stub.folder_of({}, node, 5) != client_stub.folder_of({}, node, 6)
    named = [client_stub.folder_of({"run": "trial", "experiment": text}, node, 5) for text in ("one", "two")]
    assert named[0] != named[1]
    with pytest.raises(ClientFault, match="--node-config"):
        client_stub.folder_of({"key": "k"}, {}, 5)


def test_a_long_path_still_has_an_address(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    assert len(client_stub.address(deep)) <= 108
    (tmp_path / f"fedfm-{client_stub.os.getuid()}").chmod(0o755)
    with pytest.raises(InputError, match="open to others"):
        client_stub.address(deep)


def test_hello_contains_the_version(tmp_path):
    (app,) = sites(FedAvg(), tmp_path, {"a": [1.0]}).values()
    head, data = payload.encode(codec.envelope(0, 0, {"classes": []}))
    told = payload.decode(*app.site.answer("a", HELLO, head, b"".join(data)), None)["body"]
    assert told == {"name": "a", "fedfm": __version__, "wire": 1, "model": "f" * 64, "own_data": False}


def test_a_request_that_is_none_gets_a_fault(tmp_path):
    (app,) = sites(FedAvg(), tmp_path, {"a": [1.0]}).values()
    for head in ("", "null", '{"m":{"round":true}}', '{"m":{"round":{"s":"1"},"call":"i","body":null}}'):
        answer = payload.decode(*app.site.answer("a", "train.FedAvg_train", head, b"\0" * 8), None)
        assert answer["fault"]["code"] in ("E_FORMAT", "E_FIELD")


# --- what a site holds ------------------------------------------------------------------------------------------------

WIDE = Params({"w": torch.arange(1.0, 8193.0)})  # 32 kB: worth a reference


@dataclass(frozen=True)
class Twice(FedAvg):
    """Every client is sent the same parameters in two messages, as for an evaluation and for training."""

    asks: ClassVar[tuple[str, ...]] = ("judge", "tune")

    @on_client
    def judge(self, client: Client, w: Params) -> Update:
        return Update(Params({"w": w["w"][:1]}), 1.0, {})

    @on_client
    def tune(self, client: Client, w: Params) -> Update:
        return Update(Params({"w": w["w"][:1] + float(client.id == "a")}), 1.0, {})


def ask_halves(fed, method, w):
    return [{c: u.delta["w"].item() for c, u in fed.ask(half, w=w).items()} for half in (method.judge, method.tune)]


def test_parameters_that_a_site_holds_do_not_cross_again(tmp_path):
    method = Twice()
    whole, _ = over_flower(method, tmp_path / "whole")
    fed, grid = over_flower(method, tmp_path / "spared", spare=True)
    for w in (WIDE, 2.0 * WIDE):
        assert ask_halves(fed, method, w) == ask_halves(whole, method, w)
    assert fed.excluded == []
    assert fed.transcript.bytes_down == whole.transcript.bytes_down
    sizes = [serialised_nbytes(m.content) for m in grid.sent if m.metadata.message_type != HELLO]
    spared = sum(json.loads(crossing.line()).get("spared", 0) for crossing in fed.transcript.pending)
    assert sum(sizes) == fed.transcript.bytes_down - spared
    # Of each client's second and fourth message; a reference takes 100 bytes.
    assert 2 * len(ROWS) * (WIDE.nbytes - 100) < spared < 2 * len(ROWS) * WIDE.nbytes
    assert "spared" not in whole.transcript.pending[-1].line()


def test_a_site_that_lost_its_parameters_gets_the_complete_message(tmp_path):
    method = Twice()
    fed, grid = over_flower(method, tmp_path, spare=True)
    assert fed.ask(method.judge, w=WIDE).keys() == ROWS.keys()
    site = grid.apps[100].site
    site._cache = type(site._cache)(lambda: None)  # as a worker process that has started again
    assert fed.ask(method.tune, w=WIDE).keys() == ROWS.keys()
    assert fed.excluded == []
    tuned = [m for m in grid.sent if m.metadata.message_type.endswith("Twice_tune")]
    assert sorted(serialised_nbytes(m.content) > WIDE.nbytes for m in tuned) == [False, False, False, True]


def test_a_site_that_claims_to_hold_what_it_does_not_is_sent_it(tmp_path):
    def mischief(request, reply):
        if request.metadata.message_type == HELLO and request.metadata.dst_node_id == 100:
            nothing, claim = (payload.encode({"held": names})[0][6:-2] for names in ([], [WIDE.sha256()]))
            head = reply.content["head"]
            assert nothing in head["json"]
            head["json"] = head["json"].replace(nothing, claim)
        return [reply]

    method = Twice()
    fed, grid = over_flower(method, tmp_path, mischief, spare=True)
    assert fed.ask(method.judge, w=WIDE).keys() == ROWS.keys()
    assert fed.excluded == []
    judged = [m for m in grid.sent if m.metadata.message_type.endswith("Twice_judge")]
    assert sorted(serialised_nbytes(m.content) > WIDE.nbytes for m in judged) == [False, True, True, True]
