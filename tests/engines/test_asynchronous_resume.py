"""A server of asynchronous rounds that stops and goes on: who has answered, or is still at it, trains no second time.

Each server has a Grid of its own, as each of Flower's runs has its own messages; the sites stay.
"""

import json
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import ClassVar

import pytest
from test_apps import App

from fedfm.aggregation._asynchronous import with_buffer
from fedfm.aggregation.base import Aggregator
from fedfm.config.run_spec import AsynchronousSpec, RunSpec
from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, ClientData, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply
from fedfm.core.rows import Rows
from fedfm.core.transport import link_of
from fedfm.core.wire import codec
from fedfm.engines.flower.async_link import FlowerStream
from fedfm.engines.flower.client_host import ClientHost
from fedfm.engines.flower.private_api import identity
from fedfm.engines.flower.recovery.last_reply import FILE, LastAnswer, referenced_name
from fedfm.engines.flower.recovery.pending_requests import PendingRequests, SentRequest
from fedfm.engines.flower.registry import NAMELESS
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.runtime.async_scores import Newest
from fedfm.training import SGD
from grid import InProcessGrid
from toy import Quadratic, Toys

ROWS = {"a": [1.0], "b": [2.0, 3.0], "c": [-1.0]}
NODES = {102: "a", 101: "b", 100: "c"}
ETA = 0.25


@pytest.fixture(autouse=True)
def _identity():
    with identity():
        yield


@dataclass(frozen=True)
class Counted(FedAvg):
    """FedAvg that writes down who trains, and for which request: each has a seed of its own."""

    traits: ClassVar[Traits] = Traits(accepts_stale_updates=True)
    means: ClassVar[tuple[str, ...]] = ("train",)
    passes: list = field(default_factory=list, metadata={"help": "who trained"})

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        self.passes.append((client.id, client.seed))
        return FedAvg.train(self, client, w)


class World:
    """Sites that stay, and one server after the other."""

    def __init__(self, folder, transport="float32", toys=Toys):
        self.folder, self.method = folder, Counted(local=SGD(learning_rate=ETA, batch_size=8))
        self.passes, self.transport = self.method.passes, transport
        spec = RunSpec(asynchronous=AsynchronousSpec(buffer=2), transport=transport)
        told = SimpleNamespace(method=self.method, aggregation=Aggregator(), run=spec, privacy=None)
        self.apps = {}
        for node, name in NODES.items():
            own = toys({name: ROWS[name]})
            own.model.identity = "f" * 64
            (folder / name).mkdir(parents=True)
            file = folder / name / FILE
            site = ClientHost(
                lambda: told, folder / name / "memory", lambda experiment, classes, o=own: o, answers=file
            )
            self.apps[node] = App(site, name)

    def serve(self, lost=(), after=None, stop=lambda: False, busy=(), **more):
        """A server, from the first round on or after a commit; replies of the ``lost`` to requests for training do not
        arrive, and those of the ``busy`` to any message when ``self.end()`` is called.
        """
        later = []

        def mischief(request, reply):
            training, name = request.metadata.message_type.startswith("train"), NODES[request.metadata.dst_node_id]
            if name in busy:
                later.append(reply)
            return [] if name in busy or (training and name in lost) else [reply]

        grid = InProcessGrid(self.apps, mischief)
        self.end = lambda: grid._replies.extend(later)
        link = FlowerStream(
            grid,
            outstanding=PendingRequests(self.folder),
            timeout=5.0,
            expected=sorted(ROWS),
            spare=True,
            stop=stop,
            **more,
        )
        hellos, model = len(grid.sent), Toys(ROWS).model
        fed = Federation(
            link_of(link, self.transport, model), model=model, aggregator=with_buffer(Aggregator(), 2, 0.5, {})
        )
        if after is not None:
            fed.restore(after)

        def step(w, t):
            fed.begin(t)
            return self.method.step(fed, w, t)

        return fed, step, lambda: [_to(message) for message in grid.sent[hellos:]]

    def trained(self):
        """Who did, sorted; nobody did twice for one request."""
        assert len(self.passes) == len(set(self.passes))
        return "".join(sorted(name for name, _ in self.passes))


def _to(message):
    """A client's name, with a question mark if the message refers to an answer that the site keeps."""
    body = codec.from_record(message.content, None, 1 << 30)["body"]
    return NODES[message.metadata.dst_node_id] + "?" * (referenced_name(body) is not None)


def change(client, w):
    return -ETA * (w - sum(ROWS[client]) / len(ROWS[client]))


def update(w, came):
    """By hand: the server's w after a buffer of {client: (w that it had, tau)}."""
    n = {client: len(ROWS[client]) for client in came}
    return w + sum(n[c] * change(c, was) / (1 + tau) ** 0.5 for c, (was, tau) in came.items()) / sum(n.values())


def value(w):
    return float(w["w"])


def loss(rows, w):
    return sum((value(w) - a) ** 2 / 2 for a in rows) / len(rows)


class Next(set):
    """Clients each of whose next answers is lost, and no other."""

    def __contains__(self, client):
        found = super().__contains__(client)
        self.discard(client)
        return found


def test_an_answer_that_was_lost_on_the_way_is_found_at_its_site_while_the_server_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.engines.flower.recovery.lost_messages.FIRST", 0.2)
    monkeypatch.setattr("fedfm.engines.flower.recovery.node_presence._LOOK", 0.0)
    world, told = World(tmp_path), []
    fed, step, sent = world.serve(lost=Next("abc"), returns=True, notice=told.append)
    w = fed.initial
    for t in (1, 2, 3):
        w = step(w, t)
    assert not fed.excluded
    told = [text for text in told if text != NAMELESS]
    assert len(told) == 3
    assert sorted(sent()) == sorted(world.trained() + "abcabc")  # and for each a hello, and its request again


@pytest.mark.parametrize("transport", ["float32", "bfloat16"])
def test_an_answer_that_nobody_pulled_is_asked_for_and_not_trained_again(tmp_path, transport):
    world = World(tmp_path, transport)
    fed, step, _ = world.serve(lost="c")
    w = [fed.initial]
    for t in (1, 2):
        w.append(step(w[-1], t))
    assert fed.in_flight == {"c": (1, 1)}
    assert world.trained() == "aabbc"
    fed, step, sent = world.serve(after=fed.in_flight)  # the former was killed after the commit of round 2
    assert fed.in_flight == {"c": (1, 1)}
    cohorts = []
    for t in (3, 4):
        w.append(step(w[-1], t))
        cohorts.append(fed.cohort)
    assert world.trained().count("c") == 1 + sent().count("c")  # for one it was asked for the answer alone
    assert sent().count("c?") == 1
    t = next(t for t, cohort in zip((3, 4), cohorts, strict=True) if "c" in cohort)
    other = next(client for client in cohorts[t - 3] if client != "c")
    tolerance = 1e-5 if transport == "float32" else 2e-2
    hand = update(value(w[t - 1]), {"c": (value(w[0]), t - 1), other: (value(w[t - 1]), 0)})
    if t == 4 and fed.began[other] == 3:
        hand = update(value(w[3]), {"c": (value(w[0]), 3), other: (value(w[2]), 1)})
    assert value(w[t]) == pytest.approx(hand, rel=tolerance)
    assert fed.excluded == []


def test_replies_that_the_server_has_pulled_are_not_sent_again(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve()
    first = step(fed.initial, 1)
    assert fed.in_flight == {"c": (1, 1)}  # its answer is here, and in no buffer
    fed, step, sent = world.serve(after=fed.in_flight)
    second = step(first, 2)
    assert fed.cohort == ("a", "c")
    assert sent() == ["a", "b", "c"]  # the third is asked for a pass on the new model
    assert world.trained() == "aabbcc"
    hand = update(value(first), {"c": (value(fed.initial), 1), "a": (value(first), 0)})
    assert value(second) == pytest.approx(hand, rel=1e-5)


@pytest.mark.parametrize("pulled", [True, False])
def test_resuming_an_unfinished_round_sends_no_request_again(tmp_path, pulled):
    world = World(tmp_path)
    fed, step, _ = world.serve()
    first, underway = step(fed.initial, 1), dict(fed.in_flight)
    if pulled:
        second, cohort = step(first, 2), fed.cohort  # and then the server was killed, before the commit
    else:
        _, step, _ = world.serve(lost="abc", after=underway, stop=lambda: len(world.passes) == 6)
        with pytest.raises(KeyboardInterrupt):
            step(first, 2)
    assert world.trained() == "aabbcc"  # the third for its answer that was in no buffer, and with it
    fed, step, sent = world.serve(after=underway)
    again = step(first, 2)
    assert world.trained() == "aabbcc"
    assert sent() == ([] if pulled else ["a?", "b?", "c?"])
    hand = update(value(first), {"c": (value(fed.initial), 1), "a": (value(first), 0)})
    assert value(again) == pytest.approx(hand, rel=1e-5)
    if pulled:
        assert (again.sha256(), fed.cohort) == (second.sha256(), cohort)


@pytest.mark.sample("0", "1", "4", "7", "11")
@pytest.mark.parametrize("seed", range(12))
def test_whenever_the_server_is_killed_nobody_trains_twice_for_one_request(tmp_path, seed):
    """Each server gets no answers of one site, or all answers; a killed one has not committed its last round."""
    rng, world = random.Random(seed), World(tmp_path)
    fed, step, _ = world.serve(lost=rng.choice(["", *"abc"]))
    w, underway, t, kills = fed.initial, {}, 1, 0
    while t <= 12:
        found = step(w, t)
        if rng.random() < 0.4:
            kills += 1
            fed, step, _ = world.serve(after=underway, lost=rng.choice(["", *"abc"]))
        else:
            w, underway, t = found, dict(fed.in_flight), t + 1
        assert fed.excluded == []
        world.trained()
    assert kills


def test_a_site_that_is_still_at_it_holds_up_no_hello(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve(lost="c")
    w = step(fed.initial, 1)
    fed, step, _ = world.serve(after=fed.in_flight, busy="c")
    assert fed.clients == ("a", "b", "c")
    for t in (2, 3):
        w = step(w, t)
        assert fed.cohort == ("a", "b")
    assert fed.in_flight == {"c": (1, 1)}
    world.end()
    for t in (4, 5):
        w = step(w, t)
    assert fed.began["c"] == 1
    assert fed.excluded == []
    assert world.trained().count("c") == 1 + ("c" in fed.in_flight)  # what it is at now, it was asked for since


class Judging(Quadratic):
    """Its score of rows is their mean loss."""

    def evaluate(self, rows):
        return {"n": len(rows), "accuracy": None, "loss": self.loss(rows.batch(range(len(rows)))).item()}


class Judged(Toys):
    """Clients whose training rows are their test rows, too."""

    def __init__(self, rows):
        super().__init__(rows)
        self.model = self.client_model = Judging()

    def data(self, client):
        return ClientData(lambda: self._rows[client], lambda: Rows(), lambda: self._rows[client])


def test_sites_score_the_model_that_they_train_and_nobody_waits_for_it(tmp_path):
    """Each line against the loss worked by hand; who has not answered for long is left out."""
    world, busy = World(tmp_path, toys=Judged), set()
    fed, step, sent = world.serve(busy=busy)
    busy.add("c")
    newest, w, before = Newest(fed, 1, 2), [fed.initial], fed.clients
    came = dict.fromkeys(before, 0)  # the start model, which all have scored
    newest.begin("test", {c: {"n": len(a), "accuracy": None, "loss": loss(a, fed.initial)} for c, a in ROWS.items()})
    for t in range(1, 16):
        w.append(step(w[-1], t))
        newest.hear()
        came |= {client: fed.began[client] - 1 for client in fed.cohort}
        if t == 2:
            world.end()  # c's first answer, to the model of round 0, and none to the next request
        rounds, scores = newest.rounds(), newest.of("test")
        assert rounds == {client: r for client, r in came.items() if t - r <= 1 + 4 * 3 / 2}
        assert scores.keys() == {*before}
        for client, r in rounds.items():
            by_hand = pytest.approx(loss(ROWS[client], w[r]), rel=1e-4)
            assert scores[client] == {"n": len(ROWS[client]), "loss": by_hand}
        assert [client for client in before if not scores[client]] == [c for c in before if c not in rounds]
    assert came["c"] == 0
    assert "c" not in newest.rounds()  # it was in some lines, and is no more
    assert newest.of("val") == {client: {} for client in before}
    assert set("".join(sent())) == set("abc")
    assert fed.excluded == []


class Unjudged(Judged):
    """Clients whose rows cannot be scored."""

    def __init__(self, rows):
        super().__init__(rows)
        self.model.evaluate = None


def test_a_failure_of_scores_does_not_prevent_training(tmp_path):
    world = World(tmp_path, toys=Unjudged)
    fed, step, _ = world.serve()
    w = fed.initial
    for t in (1, 2, 3):
        w = step(w, t)
    assert fed.excluded == []
    assert fed.client_metrics
    assert all(of["sent/failed"] == 1 for of in fed.client_metrics.values())  # it says so, and no score
    assert len(world.trained()) >= 6


def test_a_site_that_lost_its_answer_gets_the_request_again(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve(lost="c")
    w = step(fed.initial, 1)
    (tmp_path / "c" / FILE).unlink()
    fed, step, sent = world.serve(after=fed.in_flight)
    for t in (2, 3):
        w = step(w, t)
    assert world.trained().count("c") == 1 + sent().count("c") >= 2
    assert sent().count("c?") == 1  # for the answer, and then whole
    assert fed.began["c"] == 2  # with the newest model when the run went on
    assert fed.excluded == []


@pytest.mark.parametrize("damage", ["the server's list", "an older checkpoint", "the answer"])
def test_damaged_records_and_mismatched_answers_are_requested_again(tmp_path, damage):
    world = World(tmp_path)
    fed, step, _ = world.serve(lost="c")
    w, underway = step(fed.initial, 1), dict(fed.in_flight)
    if damage == "the server's list":
        (tmp_path / "underway.json").write_text((tmp_path / "underway.json").read_text()[:-40])
    elif damage == "an older checkpoint":
        underway = {"c": (0, 3)}
    else:
        kept = tmp_path / "c" / FILE
        kept.write_bytes(kept.read_bytes()[:-1])
    fed, step, _ = world.serve(after=underway)
    for t in (2, 3):
        w = step(w, t)
    assert world.trained().count("c") >= 2
    assert fed.began["c"] == 2
    assert fed.excluded == []


def test_a_second_stop_finds_what_was_asked_instead(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve(lost="c")
    w = step(fed.initial, 1)
    (tmp_path / "c" / FILE).unlink()
    fed, step, _ = world.serve(after=fed.in_flight)
    w = step(w, 2)
    assert fed.cohort == ("a", "b")
    assert fed.in_flight["c"] == (2, 1)  # asked anew, and its answer is not pulled
    fed, step, _ = world.serve(after=dict(fed.in_flight))
    for t in (3, 4):
        w = step(w, t)
        if "c" in fed.cohort:
            break
    assert world.trained().count("c") == 2 + (fed.in_flight.get("c") == (t, 1))  # what was not pulled, it kept
    assert fed.began["c"] == 2
    assert fed.excluded == []


def test_a_policy_that_was_changed_holds_for_an_answer_too(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve(lost="c")
    w = step(fed.initial, 1)
    world.apps[100].site.silos.allow = ("scores",)
    fed, step, _ = world.serve(after=fed.in_flight)
    for t in (2, 3):
        w = step(w, t)
    assert {(e.client, e.code) for e in fed.excluded} == {("c", "E_REFUSED")}
    assert world.trained().count("c") == 1


def test_files_are_the_servers_alone_and_at_most_three_a_client(tmp_path):
    world = World(tmp_path)
    fed, step, _ = world.serve()
    w = fed.initial
    for t in range(1, 6):
        w = step(w, t)
    told = json.loads((tmp_path / "underway.json").read_text())
    assert told.keys() == ROWS.keys()
    assert {name: (told[name]["round"], told[name]["call"]) for name in fed.in_flight} == fed.in_flight
    kept = [tmp_path / "underway.json", *(tmp_path / "underway").iterdir(), *tmp_path.glob(f"*/{FILE}")]
    assert len(kept) <= 1 + 3 * len(ROWS)  # the last two answers here, the last at the site
    assert [path for path in kept if path.stat().st_mode & 0o077] == []
    PendingRequests(tmp_path).clear()
    assert not (tmp_path / "underway").exists()
    assert not (tmp_path / "underway.json").exists()


def test_the_answer_before_stays_until_its_client_is_asked_for_another_pass(tmp_path):
    def sent(t, name):
        return SentRequest(100, t, 1, "train.Counted_train", "p" * 64, name, 10, 0)

    kept = PendingRequests(tmp_path)
    kept.enter({"c": sent(1, "first")})
    assert kept.at_work() == {100: "c"}
    kept.keep("c", Reply("c", {"x": 1.5}, 1, 1, 10, 5))
    kept.enter({"c": sent(2, "short")})
    kept.enter({"c": sent(2, "whole")})  # the site did not hold what it referred to
    for now in (kept, PendingRequests(tmp_path)):
        assert [one.name for one in now.last_requests("c")] == ["whole", "first"]
        answers = [now.answer("c", one) for one in now.last_requests("c")]
        assert answers[0] is None
        assert (answers[1].value, answers[1].round) == ({"x": 1.5}, 1)
        assert now.at_work() == {100: "c"}
    kept.enter({"c": sent(3, "third")})
    assert [one.name for one in kept.last_requests("c")] == ["third"]  # the second was not answered
    assert list((tmp_path / "underway").iterdir()) == []


def test_a_full_disk_keeps_nothing_and_stops_nothing(tmp_path, monkeypatch):
    def full(path, *args, **more):
        raise RunError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr("fedfm.core.storage.write_atomic", full)
    world = World(tmp_path)
    fed, step, _ = world.serve()
    w = fed.initial
    for t in (1, 2):
        w = step(w, t)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert fed.excluded == []
    monkeypatch.undo()
    monkeypatch.setattr("fedfm.engines.flower.recovery.pending_requests._MOST", 1)  # bytes of answers at the server
    world = World(tmp_path / "other")
    fed, step, _ = world.serve()
    w = step(step(fed.initial, 1), 2)
    assert not (tmp_path / "other/underway").exists()
    fed, step, sent = world.serve(after=fed.in_flight)
    step(w, 3)
    assert len(sent()) == 3
    assert len(world.passes) == 7  # three, two, and of the resumed one the two that nobody had asked


def test_only_a_complete_answer_with_the_right_name_is_found(tmp_path):
    kept = LastAnswer(tmp_path / FILE)
    assert kept.find("x") is None
    kept.keep("x", "asked", '{"m":{}}', b"1\n2")
    assert LastAnswer(tmp_path / FILE).find("x") == ("asked", '{"m":{}}', b"1\n2")
    assert kept.find("y") is None
    kept.keep("y", "", "null", b"")
    assert kept.find("x") is None
    assert kept.find("y") == ("", "null", b"")
