"""A silo gets its hello when it is first asked, so the cost of a run follows its cohorts and not its federation."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from flwr.app import Error, Message
from hypothesis import given, settings
from hypothesis import strategies as st
from test_apps import App, sites

import fedfm
from carried import Carried, Heard, waiting
from fedfm import __version__
from fedfm.aggregation.base import Aggregator
from fedfm.config.experiment import Experiment
from fedfm.core.federation import Federation
from fedfm.core.messages import Request
from fedfm.core.wire import codec
from fedfm.engines.flower import client_stub
from fedfm.engines.flower.app_writer import experiment_text
from fedfm.engines.flower.client_host import of_folder
from fedfm.engines.flower.link import FlowerLink
from fedfm.engines.flower.private_api import error_codes, identity
from fedfm.engines.flower.server_app import host
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.methods.scaffold import Scaffold
from fedfm.privacy.exposure import HELLO
from fedfm.runtime.run_directory import Run
from fedfm.training import SGD
from grid import InProcessGrid
from processes import same
from toy import Toys, federation, run

ROWS = {name: [float(k), float(k * k)] for k, name in enumerate("abcdefgh")}
METHOD = Scaffold(local=SGD(batch_size=2), fraction=0.25)


class Named(InProcessGrid):
    """A SuperLink's Grid: it knows the names under which the keys of the nodes are registered."""

    def __init__(self, apps, mischief=lambda request, reply: [reply], nameless=()) -> None:
        super().__init__(apps, mischief)
        self.names = {node: "" if app.name in nameless else app.name for node, app in apps.items()}

    def get_nodes(self):
        return [SimpleNamespace(node_id=n, last_activated_at="", name=self.names[n]) for n in self.apps]

    def hellos(self):
        """The clients that got a hello, in order."""
        sent = (m.metadata for m in self.sent if m.metadata.message_type == HELLO)
        return [self.apps[m.dst_node_id].name for m in sent]


def lazy(grid, **link):
    return FlowerLink(grid, **{"timeout": 5.0, "spare": True, "lazy": True, "expected": sorted(ROWS), **link})


def requests(clients, t=1):
    zero = Params({"w": Toys(ROWS).model.params()["w"] * 0})
    payload = {"x": zero, "c": zero}
    return [Request(client, "train.Scaffold_train", payload, t, 1) for client in clients]


# --- Flower -----------------------------------------------------------------------------------------------------------


def test_only_those_that_are_asked_are_greeted_and_the_bits_are_the_local_ones(tmp_path):
    with identity():
        grid = Named(sites(METHOD, tmp_path / "sites", ROWS))
        link = lazy(grid)
        assert grid.hellos() == ["a"]  # one, which tells whether silos have their own rows
        fed = Federation(link, model=Toys(ROWS).model, aggregator=Aggregator())
        link.record(fed.transcript.add)
        assert fed.clients == tuple(sorted(ROWS))
        state = run(METHOD, fed, 3)[-1]
    trained = {grid.apps[m.metadata.dst_node_id].name for m in grid.sent if m.metadata.message_type != HELLO}
    assert set(grid.hellos()) == trained | {"a"}
    assert len(grid.hellos()) == len(set(grid.hellos())) < len(ROWS)
    crossings = [c for c in fed.transcript.pending if c.handler == HELLO and c.sender == "server"]
    first = {c.receiver: c.round for c in crossings}
    began = {m.receiver: m.round for m in reversed(fed.transcript.pending) if m.handler != HELLO}
    assert {client: first[client] for client in trained - {"a"}} == {c: began[c] for c in trained - {"a"}}
    expected = run(METHOD, federation(METHOD, ROWS, tmp_path / "local", workers=1), 3)[-1]
    for client in ROWS:
        assert METHOD.params_for(state, client).sha256() == METHOD.params_for(expected, client).sha256()


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.sets(st.sampled_from(sorted(ROWS)), min_size=1), min_size=1, max_size=4),
    st.sets(st.sampled_from(sorted(ROWS))),
)
def test_each_node_gets_one_hello_and_before_its_first_request(tmp_path_factory, cohorts, nameless):
    with identity():
        grid = Named(sites(METHOD, tmp_path_factory.mktemp("sites"), ROWS), nameless=nameless)
        link = lazy(grid, expected=(), gather=0.0)
        before = grid.hellos()
        assert set(before) >= nameless  # whose name is known from its hello only
        assert len(before) == max(len(nameless), 1)
        assert list(link.clients) == sorted(ROWS)
        for t, cohort in enumerate(cohorts, 1):
            replies = list(link.exchange(requests(sorted(cohort), t)))
            assert {r.client for r in replies if r.fault is None} == cohort
    found = grid.hellos()
    assert len(found) == len(set(found))
    assert set(found) == set(before).union(*cohorts)
    greeted = set()
    for message in grid.sent:
        node = message.metadata.dst_node_id
        assert (message.metadata.message_type == HELLO) == (node not in greeted)
        greeted.add(node)


@pytest.mark.parametrize("change", [{"fedfm": "0.0.0"}, {"name": "b"}])
def test_a_silos_version_and_name_are_checked_at_its_first_request(tmp_path, change):
    """Another version, and another silo's name."""

    def lie(request, reply):
        if request.metadata.message_type == HELLO and request.metadata.dst_node_id == 100:  # node of "h"
            told = codec.from_record(reply.content, None)
            assert told["body"]["fedfm"] == __version__
            told["body"] |= change
            reply.content = codec.to_record(told)
        return [reply]

    notices = []
    with identity():
        link = lazy(Named(sites(METHOD, tmp_path, ROWS), lie), notice=notices.append)
        assert notices == []
        (first, second) = ({r.client: r for r in link.exchange(requests(["b", "h"], t))} for t in (1, 2))
    code = "E_VERSION" if "fedfm" in change else "E_CLIENT"
    for found in (first, second):
        assert found["h"].fault.code == code
        assert found["b"].fault is None
    assert [text for text in notices if text.startswith("h does not take part")] == notices
    assert len(notices) == 1


def test_a_silo_that_did_not_answer_its_hello_gets_another_with_its_next_request(tmp_path):
    lost = [True]

    def silent(request, reply):
        if request.metadata.message_type == HELLO and request.metadata.dst_node_id == 100 and lost:
            lost.pop()
            gone = Message(Error(error_codes().NODE_UNAVAILABLE, "no heartbeat"), reply_to=request)
            gone.metadata.__dict__["_src_node_id"] = 1
            return [gone]
        return [reply]

    with identity():
        grid = Named(sites(METHOD, tmp_path, ROWS), silent)
        link = lazy(grid)
        (first,) = link.exchange(requests(["h"], 1))
        (second,) = link.exchange(requests(["h"], 2))
    assert first.fault.code == "E_DIED"
    assert second.fault is None
    assert grid.hellos() == ["a", "h", "h"]


def test_a_run_of_which_no_silo_answers_does_not_begin(tmp_path):
    def refuse(request, reply):
        reply.content = codec.to_record(codec.from_record(reply.content, None) | {"body": {}})
        return [reply]

    with identity():
        grid = Named(sites(METHOD, tmp_path, ROWS), refuse)
        with pytest.raises(RunError, match="0 of 8 connected nodes can take part") as error:
            lazy(grid)
    assert "its hello has no name" in str(error.value)
    assert sorted(grid.hellos()) == sorted(ROWS)  # until one takes part
    with identity(), pytest.raises(RunError, match="8 of 8 connected nodes can take part, min_clients is 9"):
        lazy(Named(sites(METHOD, tmp_path / "few", ROWS)), min_clients=9, gather=0.2, expected=[*ROWS, "i"])


def test_a_later_silo_with_rows_of_its_own_does_not_join_clients_of_one_table(tmp_path):
    def own(request, reply):
        if request.metadata.message_type == HELLO and request.metadata.dst_node_id == 100:
            told = codec.from_record(reply.content, None)
            told["body"]["own_data"] = True
            reply.content = codec.to_record(told)
        return [reply]

    with identity():
        link = lazy(Named(sites(METHOD, tmp_path, ROWS), own))
        (reply,) = link.exchange(requests(["h"]))
    assert reply.fault.code == "E_CLIENT"
    assert "it has its own rows" in reply.fault.reason


# --- silos with their own rows, on both engines of silos --------------------------------------------------------------

SILOS = ("east", "middle", "north", "south", "west")
FEW = {"method": {"name": "scaffold", "rounds": 3, "fraction": 0.4}, "run": {"evaluate_fraction": 0.4}}


def cohorts(path):
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {name for line in lines for name in (*line["cohort"], *line["client_accuracy"])}


@pytest.fixture
def carried(tmp_path):
    return Carried(tmp_path, names=SILOS)


def ledgers(carried):
    """The silos that were asked anything at all."""
    return {name for name in SILOS if (carried.root / name / "silo.ledger.jsonl").exists()}


def test_silos_of_a_folder_that_no_round_asks_get_no_letter(carried, monkeypatch):
    waiting(monkeypatch, carried.pump)
    result = fedfm.run(carried.engine(**FEW), carried.root / "run", progress=fedfm.Progress())
    same(result, carried.local(**FEW))
    asked = cohorts(carried.root / "run")
    assert ledgers(carried) == asked < set(SILOS)
    for name in SILOS:
        assert (carried.disk / "to" / name).exists() == (name in asked)
    for name in asked:
        assert [line["handler"] for line in carried.left(name)].count(HELLO) == 1
        assert carried.left(name)[0]["handler"] == HELLO


def test_a_folder_run_of_few_silos_that_is_stopped_anywhere_asks_nobody_twice(carried, monkeypatch):
    answered = []

    def once():
        for name in SILOS:
            carried.desks[name] = carried.desk(name)
            if carried.desks[name].answer():
                answered.append(name)
                return True
        return False

    waiting(monkeypatch, once)
    path, result = carried.root / "run", None
    while result is None:
        try:
            result = (fedfm.resume if path.exists() else fedfm.run)(
                *([path] if path.exists() else [carried.engine(**FEW), path]), progress=fedfm.Progress()
            )
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    assert result["params_sha256"] == carried.local(**FEW)["params_sha256"]
    assert ledgers(carried) == cohorts(path)
    kept = [(name, m["round"], m["call"], m["handler"]) for name in ledgers(carried) for m in carried.left(name)]
    assert len(kept) == len(set(kept)) == len(answered)


def test_a_folder_silo_that_does_not_fit_is_named_in_the_round_that_asks_it(carried, monkeypatch):
    for name in SILOS:
        carried.file(name).write_text(carried.file(name).read_text() + 'allow_methods = ["fedpft"]\n')
    waiting(monkeypatch, carried.pump)
    heard = Heard()
    with pytest.raises(RunError, match="0 of 2 clients gave a valid reply"):
        fedfm.run(carried.engine(**FEW | {"run": {"evaluate_every": 0}}), carried.root / "run", progress=heard)
    assert len([line for line in heard.lines if "does not take part: E_EXPERIMENT" in line]) == 2


@pytest.mark.parametrize("named", [True, False])
def test_silos_of_a_deployment_that_no_round_asks_get_no_message(carried, named):
    """The first silo is greeted before round 1; all are if the operator gave their keys no names."""
    tables = carried.tables(**FEW)
    tables["run"] |= {"engine": "deployment", "workers": 0}
    demanded, apps = Experiment.from_dict(tables), {}
    for number, name in enumerate(SILOS):
        config = {"experiment": experiment_text(demanded), "key": "k"}
        apps[100 + number] = App(*of_folder(client_stub.admit(config, {"silo": str(carried.file(name))}, 1)))
    grid = Named(apps, nameless=() if named else SILOS)
    with identity():
        result = host(Run.create(demanded, carried.root / "run"), grid, returns=False)
    same(result, carried.local(**FEW))
    asked = cohorts(carried.root / "run") | {"east"}
    assert ledgers(carried) == (asked if named else set(SILOS))
    assert len(grid.hellos()) == len(ledgers(carried))
    manifest = json.loads((carried.root / "run" / "manifest.json").read_text())
    assert any("registered without a name" in text for text in manifest["notices"]) != named
