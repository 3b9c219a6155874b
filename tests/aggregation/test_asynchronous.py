"""Buffered asynchronous rounds against a hand-written event queue, and settings that they refuse."""

import json
import math
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import fedfm
import small
import toy
from fedfm import seeds
from fedfm.aggregation._asynchronous import Buffered, with_buffer
from fedfm.aggregation.base import Aggregator
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.config.toml import to_toml
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply
from fedfm.errors import ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.progress import Progress
from fedfm.training import SGD

ROWS = {"a": [1.0, 2.0], "b": [4.0, 5.0, 6.0], "c": [-3.0], "d": [0.5, 0.25, 0.0, 1.0]}
SPEEDS = {"c": 0.1, "d": 3.0}


def took(client, t):
    draw = seeds.generator(0, "server", "arrival", client, t).standard_normal()
    return abs(draw) / SPEEDS.get(client, 1.0)


@dataclass(frozen=True)
class Failing(FedAvg):
    """FedAvg, in which these clients raise an error instead of training."""

    traits: ClassVar[fedfm.Traits] = fedfm.Traits(accepts_stale_updates=True)
    means: ClassVar[tuple[str, ...]] = ("train",)
    failing: tuple[str, ...] = field(default=(), metadata={"help": "clients that fail"})

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        if client.id in self.failing:
            raise ValueError("as ordered")
        return FedAvg.train(self, client, w)


def by_hand(buffer, rounds, eta, a, start=1.0, failing=()):
    """(w_t, who was in which buffer, clocks). A client begins when it has answered, if there is a model that it has not
    trained; else with the next server update.
    """
    w, versions, clock, queue, states, cohorts, clocks = start, {}, 0.0, {}, [start], [], []
    for t in range(1, rounds + 1):
        versions[t] = w
        for client in ROWS:
            if client not in queue:
                queue[client] = (clock + took(client, t), t)
        arrived, step, total, begin, at_once = [], 0.0, 0, clock, {}
        for client in sorted(queue, key=lambda client: queue[client][0]):
            if len(arrived) == buffer:
                break
            end, began = queue.pop(client)
            clock = max(clock, end)
            if client in failing:
                continue
            arrived.append(client)
            if began < t:
                at_once[client] = max(begin, end)
            rows = ROWS[client]
            change = -eta * (versions[began] - sum(rows) / len(rows))  # one step on all rows
            step += len(rows) * change / (1 + t - began) ** a
            total += len(rows)
        queue |= {client: (time + took(client, t), t) for client, time in at_once.items() if client != arrived[-1]}
        w += step / total
        states.append(w)
        cohorts.append(tuple(sorted(arrived)))
        clocks.append(clock)
    return states, cohorts, clocks


@pytest.mark.parametrize(("buffer", "a"), [(1, 0.5), (2, 0.5), (3, 0.0), (3, 2.0), (4, 0.5)])
def test_states_are_those_of_an_event_queue_by_hand(buffer, a, tmp_path):
    method = FedAvg(rounds=12, local=SGD(learning_rate=0.3, batch_size=8))
    late = with_buffer(Aggregator(), buffer, a, SPEEDS)
    fed = toy.federation(method, ROWS, tmp_path, aggregator=late)
    states, cohorts, clocks = by_hand(buffer, 12, 0.3, a)
    fed.begin(0)
    w = method.init(fed)
    for t in range(1, 13):
        fed.begin(t)
        w = method.step(fed, w, t)
        assert float(w["w"]) == pytest.approx(states[t], rel=1e-5)
        assert fed.cohort == cohorts[t - 1]
        assert fed.metrics["clock"] == pytest.approx(clocks[t - 1])
    whole = sum(max(took(client, t) for client in ROWS) for t in range(1, 13))
    assert fed.metrics["synchronous_clock"] == pytest.approx(whole)
    assert len(fed.memory["asynchronous.sent"]) < len(ROWS)


@pytest.mark.parametrize(("buffer", "failing"), [(1, "d"), (2, "d"), (2, "bd"), (3, "a"), (3, "c")])
def test_the_next_to_end_has_the_place_of_one_that_fails(buffer, failing, tmp_path):
    method = Failing(rounds=12, local=SGD(learning_rate=0.3, batch_size=8), failing=tuple(failing))
    fed = toy.federation(method, ROWS, tmp_path, aggregator=with_buffer(Aggregator(), buffer, 0.5, SPEEDS))
    states, cohorts, clocks = by_hand(buffer, 12, 0.3, 0.5, failing=failing)
    fed.begin(0)
    w = method.init(fed)
    for t in range(1, 13):
        fed.begin(t)
        w = method.step(fed, w, t)
        assert float(w["w"]) == pytest.approx(states[t], rel=1e-5)
        assert fed.cohort == cohorts[t - 1]
        assert (fed.heard, len(fed.cohort)) == (buffer, buffer)
        assert fed.metrics["clock"] == pytest.approx(clocks[t - 1])
    assert {e.client for e in fed.excluded} == set(failing)
    assert all((e.code, e.reason) == ("E_EXCEPTION", "ValueError: as ordered") for e in fed.excluded)


def test_a_slow_client_does_not_hold_up(tmp_path):
    """Thirty updates of three: with one of four ten times slower, by the simulated clock."""

    def clock(speeds):
        method = FedAvg(rounds=30, local=SGD(learning_rate=0.1))
        fed = toy.federation(
            method, ROWS, tmp_path / str(len(speeds)), aggregator=with_buffer(Aggregator(), 3, 0.5, speeds)
        )
        toy.run(method, fed, 30)
        return fed.metrics["clock"], fed.metrics["synchronous_clock"]

    (even, together), (uneven, held_up) = clock({}), clock({"c": 0.1})
    assert uneven < 1.2 * together
    assert held_up > 4 * uneven
    assert even < together


def test_nobody_idles_while_others_are_waited_for(tmp_path, monkeypatch):
    """Eight clients whose passes take the same time, and one of them ten times as long: seven answer in that time."""
    monkeypatch.setattr(Buffered, "duration", lambda self, seed, client, t: 10.0 if client == "a" else 1.0)
    rows = {name: [float(i)] for i, name in enumerate("abcdefgh")}
    method = FedAvg(rounds=35, local=SGD(learning_rate=0.1))
    fed = toy.federation(method, rows, tmp_path, aggregator=with_buffer(Aggregator(), 4, 0.5, {}))
    toy.run(method, fed, 35)
    assert fed.metrics["clock"] <= math.ceil(4 * 35 / 7.1)


def asynchronous(folder, rounds=6, **changes):
    tables = small.experiment(folder, method={"fraction": 1.0, "rounds": rounds})
    tables["run"] |= {"asynchronous": {"buffer": 2, "speeds": {"client-03": 0.2}}} | changes
    return tables


@pytest.mark.proof
def test_a_buffer_of_all_clients_is_a_synchronous_run(tmp_path):
    late = fedfm.run(asynchronous(tmp_path, asynchronous={"buffer": 5}), progress=Progress())
    plain = asynchronous(tmp_path)
    del plain["run"]["asynchronous"]
    assert late["params_sha256"] == fedfm.run(plain, progress=Progress())["params_sha256"]


@pytest.mark.parametrize(("buffer", "momentum", "said"), [(2, 0.9, True), (2, 0.3, False), (5, 0.9, False)])
def test_a_notice_warns_of_momentum_that_oscillates_with_late_answers(buffer, momentum, said, tmp_path, capsys):
    tables = asynchronous(tmp_path, rounds=1, asynchronous={"buffer": buffer})
    tables["method"] |= {"name": "fedavgm", "server_momentum": momentum}
    result = fedfm.run(tables, progress=Progress())
    assert any("the model oscillate" in text for text in result["warnings"]) == said
    path = tmp_path / "experiment.toml"
    path.write_text(to_toml(tables))
    assert main(["check", str(path)]) == 0
    assert ("the model oscillate" in capsys.readouterr().out) == said


def test_workers_messages_and_a_kill_change_no_bits(tmp_path):
    class Killed(Progress):
        def round(self, line):
            if line["round"] == 3:
                raise KeyboardInterrupt

    whole = fedfm.run(asynchronous(tmp_path), tmp_path / "whole", progress=Progress())
    assert whole["rounds"] == 6
    assert fedfm.run(asynchronous(tmp_path, workers=2))["params_sha256"] == whole["params_sha256"]
    assert fedfm.run(asynchronous(tmp_path, wire=True))["params_sha256"] == whole["params_sha256"]
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(asynchronous(tmp_path), tmp_path / "killed", progress=Killed())
    assert fedfm.resume(tmp_path / "killed", progress=Progress())["params_sha256"] == whole["params_sha256"]
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [0, 2, 2, 2, 2, 2, 2]
    told = whole["details"]["asynchronous"]
    assert told["largest_staleness"] == max(line.get("largest_staleness", 0) for line in lines) > 0
    assert told["clock"] == lines[-1]["clock"] < told["synchronous_clock"]


def failing(folder, *clients, **run):
    tables = asynchronous(folder, **run)
    tables["method"] |= {"name": "test_asynchronous:Failing", "failing": list(clients)}
    return tables


def test_places_of_clients_that_fail_are_the_same_with_workers_messages_and_after_a_kill(tmp_path):
    class Killed(Progress):
        def round(self, line):
            if line["round"] == 3:
                raise KeyboardInterrupt

    fail = ("client-00", "client-02")
    whole = fedfm.run(failing(tmp_path, *fail), tmp_path / "whole", progress=Progress())
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert [len(line["cohort"]) for line in lines] == [0, 2, 2, 2, 2, 2, 2]
    assert {e["client"] for line in lines for e in line["excluded"]} == set(fail)
    assert {(e["client"], e["code"]) for e in whole["excluded"]} == {(client, "E_EXCEPTION") for client in fail}
    for run in ({"workers": 2}, {"workers": 3}, {"wire": True}):
        again = fedfm.run(failing(tmp_path, *fail, **run), progress=Progress())
        assert again["params_sha256"] == whole["params_sha256"]
        assert again["excluded"] == whole["excluded"]
    with pytest.raises(KeyboardInterrupt):
        fedfm.run(failing(tmp_path, *fail), tmp_path / "killed", progress=Killed())
    resumed = fedfm.resume(tmp_path / "killed", progress=Progress())
    assert (resumed["params_sha256"], resumed["excluded"]) == (whole["params_sha256"], whole["excluded"])


def test_places_of_clients_that_fail_are_the_same_over_flower(tmp_path, monkeypatch):
    """The server of the simulation engine, over a Grid in this process."""
    from flwr.clientapp import ClientApp

    from fedfm.engines.flower.client_host import of_experiment
    from fedfm.engines.flower.private_api import identity
    from fedfm.engines.flower.server_app import host
    from fedfm.engines.flower.simulation import reply
    from fedfm.runtime.run_directory import Run
    from grid import InProcessGrid

    class App(ClientApp):
        def __init__(self, site, number):
            super().__init__()
            self.site, self.number = site, number

        def __call__(self, message, context):
            return reply(self.site, self.number, message)

    tables = failing(tmp_path, "client-00", "client-02")
    local = fedfm.run(tables, progress=Progress())
    run = Run.create(Experiment.from_dict(tables, imports=True), tmp_path / "run")
    site = of_experiment(lambda: run.experiment, tmp_path / "memory", tmp_path)
    monkeypatch.setattr("fedfm.engines.flower.server_app.is_simulated", lambda grid: True)
    with identity():
        result = host(run, InProcessGrid({100 + k: App(site, k) for k in range(5)}))
    assert result["params_sha256"] == local["params_sha256"]
    assert [(e["round"], e["client"]) for e in result["excluded"]] == [
        (e["round"], e["client"]) for e in local["excluded"]
    ]


def test_the_run_stops_where_too_few_remain(tmp_path):
    with pytest.raises(RunError) as error:
        fedfm.run(failing(tmp_path, *(f"client-0{k}" for k in range(1, 5)), min_clients=2), progress=Progress())
    assert "round 1: 1 of 2 clients gave a valid reply to train.Failing_train, 2 are needed" in str(error.value)
    assert "E_EXCEPTION: ValueError: as ordered" in str(error.value)
    result = fedfm.run(failing(tmp_path, *(f"client-0{k}" for k in range(1, 5))), progress=Progress())
    assert result["rounds"] == 6  # without run.min_clients half of a buffer is enough
    with pytest.raises(RunError, match="0 of 2 clients gave a valid reply"):
        fedfm.run(failing(tmp_path, *(f"client-0{k}" for k in range(5))), progress=Progress())


def test_an_audit_repeats_it(tmp_path):
    from fedfm.audits.replay import open_finished, replay

    fedfm.run(asynchronous(tmp_path), tmp_path / "run", progress=Progress())
    assert len(replay(open_finished(tmp_path / "run")).replies) == 12  # an error if it ends with other bits
    fedfm.run(failing(tmp_path, "client-00"), tmp_path / "failing", progress=Progress())
    assert len(replay(open_finished(tmp_path / "failing")).replies) == 12


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"name": "scaffold"}}, 'method "scaffold" requires a full cohort to answer to the same model'),
        ({"method": {"fraction": 0.5}}, "method.fraction = 0.5 asks fewer"),
        ({"run": {"asynchronous": {"buffer": 0}}}, "run.asynchronous.buffer"),
        ({"run": {"asynchronous": {}}}, "run.asynchronous.buffer"),
        ({"run": {"min_clients": 3}}, "run.min_clients = 3"),
        ({"aggregation": {"name": "secure"}}, "a hidden sum needs clients that answer together"),
        ({"privacy": {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}}, "[privacy]"),
        ({"run": {"engine": "folder", "folder": ".", "roster": "r.toml"}}, "waits for the answers of complete rounds"),
        ({"run": {"engine": "deployment"}}, "on a deployment clients have real speeds"),
    ],
)
def test_settings_that_need_complete_cohorts_are_refused(tmp_path, changes, said):
    tables = asynchronous(tmp_path)
    for table, values in changes.items():
        tables[table] = {**tables.get(table, {}), **values}
    with pytest.raises(InputError) as error:
        Experiment.from_dict(tables)
    assert said in str(error.value)


def test_a_subclass_does_not_inherit_that_late_updates_are_allowed(tmp_path):
    @dataclass(frozen=True)
    class Mine(FedAvg):
        means: ClassVar[tuple[str, ...]] = ("train",)

    tables = asynchronous(tmp_path)
    with pytest.raises(InputError, match="full cohort"):
        Experiment(tables["data"], tables["model"], Mine(), run=tables["run"])


@pytest.mark.parametrize(
    ("late", "said"),
    [({"buffer": 9}, "buffer = 9: there are 5 clients"), ({"buffer": 2, "speeds": {"nobody": 2.0}}, "called nobody")],
)
def test_asynchronous_settings_for_absent_clients_are_refused(tmp_path, late, said):
    with pytest.raises(InputError, match=said):
        fedfm.run(asynchronous(tmp_path, asynchronous=late), progress=Progress())


def test_speeds_of_unknown_clients_are_refused_before_anything_is_trained(tmp_path, capsys):
    speeds = {"buffer": 2, "speeds": {"client-3": 2.0}}
    with pytest.raises(InputError, match=r'no client is called client-3 \(did you mean "client-03"\?\)'):
        fedfm.run(asynchronous(tmp_path, asynchronous=speeds), tmp_path / "run", progress=Progress())
    assert not (tmp_path / "run").exists()

    (tmp_path / "exp.toml").write_text(
        '[data]\nname = "digits"\npartition = { name = "iid", clients = 3 }\nlimit = 60\n[model]\nname = "nano-vit"\n'
        'adaptation = { name = "head" }\n[method]\nname = "fedavg"\n[run]\n'
        "asynchronous = { buffer = 2, speeds = { client-3 = 2.0 } }\n"
    )
    assert main(["check", str(tmp_path / "exp.toml")]) == 2
    assert "no client is called client-3" in capsys.readouterr().err

    class Killed(Progress):
        def round(self, line):
            if line["round"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedfm.run(asynchronous(tmp_path), tmp_path / "killed", progress=Killed())
    manifest = json.loads((tmp_path / "killed/manifest.json").read_text())
    manifest["experiment"]["run"]["asynchronous"]["speeds"] = {"client-30": 0.2}  # by an editor
    (tmp_path / "killed/manifest.json").write_text(json.dumps(manifest))
    before = (tmp_path / "killed/metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"manifest.json was changed: run.asynchronous.speeds"):
        fedfm.resume(tmp_path / "killed", progress=Progress())
    assert (tmp_path / "killed/metrics.jsonl").read_text() == before


def test_speeds_of_clients_with_files_of_their_own_are_checked_with_the_experiment(tmp_path):
    tables = asynchronous(tmp_path, asynchronous={"buffer": 2, "speeds": {"nort": 2.0}})
    path = tables["data"]["path"]
    tables["data"] = {"clients": {"north": path, "south": path}}
    with pytest.raises(InputError, match=r'no client is called nort \(did you mean "north"\?\)'):
        Experiment.from_dict(tables)


class Answers:
    """A link that streams: a script says who answers next, and what."""

    streams = True
    requests_in_flight: ClassVar[dict] = {}  # as asked
    clients = ("a", "b", "c")

    def __init__(self, *script):
        self.script, self.asked, self.requests = list(script), {}, []

    def restore(self, awaited):
        raise AssertionError("nothing is resumed here")

    def exchange(self, requests):
        raise AssertionError("a buffer waits for nobody")

    def stream(self, requests, again):
        self.requests.append([r.client for r in requests])
        self.asked |= {r.client: r for r in requests}
        while self.script:
            client, value = self.script.pop(0)
            r = self.asked[client]
            if isinstance(value, ClientFault):
                yield Reply(client, None, r.round, r.call, 1, 0, value)
            else:
                yield Reply(client, Update(Params({"w": torch.tensor([value])}), 1.0), r.round, r.call, 1, 1)


def arriving(buffer, *script):
    link = Answers(*script)
    fed = Federation(
        link, model=toy.Quadratic(), aggregator=with_buffer(Aggregator(), buffer, 0.5, {}), min_clients=None
    )
    method = FedAvg()

    def step(t):
        fed.begin(t)
        return float(fed.mean(method.train, w=fed.initial)["w"])

    return fed, link, step


def test_whoever_answers_first_is_in_the_buffer_and_late_answers_count_less():
    fed, link, step = arriving(2, ("a", 1.0), ("b", 3.0), ("a", 5.0), ("b", 7.0), ("c", 10.0), ("a", 0.0))
    assert step(1) == 2.0
    assert step(2) == 6.0
    assert set(fed.in_flight) == {"c"}
    assert step(3) == pytest.approx((10.0 / math.sqrt(3) + 0.0) / 2)  # c began in round 1, two updates ago
    assert fed.cohort == ("a", "c")
    assert (fed.metrics["staleness"], fed.metrics["largest_staleness"]) == (1.0, 2.0)
    assert link.requests == [["a", "b", "c"], ["a", "b"], ["a", "b"]]  # c is asked once


def test_a_fault_is_left_out_and_a_second_answer_too():
    gone = ClientFault("E_EXCEPTION", "ValueError: no")
    fed, link, step = arriving(2, ("a", gone), ("b", 4.0), ("b", 9.0), ("c", 2.0), ("a", 6.0), ("b", 8.0))
    assert step(1) == 3.0
    assert [(e.client, e.code) for e in fed.excluded] == [("a", "E_EXCEPTION"), ("b", "E_DUPLICATE")]
    assert step(2) == 7.0
    assert link.requests[1] == ["a", "b", "c"]
    assert set(fed.in_flight) == {"c"}


def test_too_few_answers_stop_the_run():
    gone = ClientFault("E_DIED", "no node of that name is connected")
    _, _, step = arriving(3, ("a", gone), ("b", 4.0), ("c", gone))
    with pytest.raises(RunError, match="1 of 3 clients gave a valid reply"):
        step(1)


def test_the_scale_is_the_papers():
    assert [Buffered(1).scale(tau) for tau in (0, 3, 8)] == [1.0, 0.5, pytest.approx(1 / 3)]
