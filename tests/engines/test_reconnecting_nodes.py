"""Nodes that go and come back, and replies of a round that a stop cut off, over an in-process Grid."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from flwr.app import Error, Message
from test_apps import ROWS, sites

from fedfm.aggregation.base import Aggregator
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.engines.flower.link import FlowerLink
from fedfm.engines.flower.private_api import error_codes, identity, push_error
from fedfm.engines.flower.recovery import parameter_cache
from fedfm.engines.flower.recovery.round_replies import RoundReplies
from fedfm.errors import ClientFault
from fedfm.linalg.params import Params
from fedfm.methods.scaffold import Scaffold
from fedfm.training import SGD
from grid import InProcessGrid
from toy import Toys, federation, run

NODE = 101  # of "b": test_apps numbers the nodes in the reverse order of names
METHOD = Scaffold(local=SGD(batch_size=2))


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    monkeypatch.setattr("fedfm.engines.flower.recovery.node_presence._LOOK", 0.0)
    with identity():
        yield


class Restless(InProcessGrid):
    """A Grid whose node ``b`` goes when it is asked for the n-th time, and comes back after some looks at it.

    Args:
        goodbye: the SuperLink knows that it has gone, and says so; else it only sees that the node began anew.
        back: looks until it is back; None: never.
    """

    def __init__(self, apps, *, at: int, goodbye: bool, back: int | None) -> None:
        super().__init__(apps, lambda request, reply: [reply] if goodbye or not reply.has_error() else [])
        self._at, self._back = at, back
        self.asked, self._looks, self._gone = 0, 0, False

    def get_nodes(self):
        self._looks += self._gone
        if self._gone and self._back is not None and self._looks > self._back:
            self._gone = False
        since = "later" if self._looks else "first"
        there = [node for node in self.apps if not (self._gone and node == NODE)]
        return [SimpleNamespace(node_id=n, last_activated_at=since if n == NODE else "first") for n in there]

    def _answer(self, message):
        if message.metadata.dst_node_id != NODE:
            return super()._answer(message)
        self.asked += 1
        if self.asked == self._at:
            self._gone = True
        if not self._gone:
            return super()._answer(message)
        reply = Message(Error(error_codes().NODE_UNAVAILABLE, "no heartbeat"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply


def over(grid, **link):
    link = FlowerLink(grid, **{"timeout": 20.0, "expected": sorted(ROWS), "returns": True, **link})
    return Federation(link, model=Toys(ROWS).model, aggregator=Aggregator())


@pytest.mark.parametrize("goodbye", [True, False])
@pytest.mark.parametrize("at", [1, 3])  # at the hello, and at round 2
def test_a_node_that_comes_back_is_asked_again_and_no_bit_changes(tmp_path, goodbye, at):
    grid = Restless(sites(METHOD, tmp_path / "a"), at=at, goodbye=goodbye, back=3)
    told = []
    fed = over(grid, waits=lambda asked, missing: told.append(sorted(missing)))
    state = run(METHOD, fed, 3)[-1]
    assert fed.excluded == []
    alone = federation(METHOD, ROWS, tmp_path / "b", workers=1)
    expected = run(METHOD, alone, 3)[-1]
    for client in ROWS:
        assert METHOD.params_for(state, client).sha256() == METHOD.params_for(expected, client).sha256()
    assert fed.transcript.bytes_down == alone.transcript.bytes_down
    assert grid.asked >= 5  # a hello, three rounds, and what it forgot
    assert [len(m.metadata.group_id) for m in grid.sent if m.metadata.dst_node_id != NODE] == [1] * 8  # the others once
    assert (["b"] in told) == (at == 3)  # clients have names after the hello
    assert told[-1] == []


def test_a_reply_that_is_lost_on_the_way_is_asked_for_again(tmp_path):
    left = [error_codes().MESSAGE_UNAVAILABLE, error_codes().REPLY_MESSAGE_UNAVAILABLE]

    def lose(request, reply):
        if request.metadata.message_type == "train.Scaffold_train" and left and request.metadata.dst_node_id == NODE:
            reply = Message(Error(left.pop(), "its upload was cut"), reply_to=request)
        return [reply]

    fed = over(InProcessGrid(sites(METHOD, tmp_path / "a"), lose))
    state = run(METHOD, fed, 2)[-1]
    assert left == fed.excluded == []
    expected = run(METHOD, federation(METHOD, ROWS, tmp_path / "b", workers=1), 2)[-1]
    assert METHOD.params_for(state, "b").sha256() == METHOD.params_for(expected, "b").sha256()


class Swallowed(InProcessGrid):
    """A Grid that counts some messages to node ``b`` as delivered, and drops them or their answers.

    Args:
        drop: numbers of the messages to this node, from 1.
        answers: drop the answers.
    """

    def __init__(self, apps, drop: set[int], answers: bool) -> None:
        super().__init__(apps, self._swallow)
        self._drop, self._answers, self.asked = drop, answers, list[str]()

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, last_activated_at="first") for node in self.apps]

    def _answer(self, message):
        if message.metadata.dst_node_id == NODE:
            self.asked.append(message.metadata.message_type)
            if len(self.asked) in self._drop and not self._answers:
                return Message(Error(1, "never pulled"), reply_to=message)
        return super()._answer(message)

    def _swallow(self, request, reply):
        return [] if request.metadata.dst_node_id == NODE and len(self.asked) in self._drop else [reply]


HELLO, TRAIN = "query.hello", "train.Scaffold_train"


@pytest.mark.sample("drop0-asked0-True", "drop1-asked1-False")
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize(
    ("drop", "asked"),
    [
        ({1}, [HELLO] * 3 + [TRAIN] * 2),  # the hello
        ({3}, [HELLO] + [TRAIN] * 2 + [HELLO] + [TRAIN]),  # round 2
        ({3, 4}, [HELLO] + [TRAIN] * 2 + [HELLO] * 2 + [TRAIN]),  # round 2, and the hello that is to tell
    ],
)
def test_lost_messages_are_noticed_by_a_hello_and_sent_again(tmp_path, monkeypatch, drop, asked, answers):
    monkeypatch.setattr("fedfm.engines.flower.recovery.lost_messages.FIRST", 0.2)
    told = []
    fed = over(grid := Swallowed(sites(METHOD, tmp_path / "a"), drop, answers), notice=told.append)
    state = run(METHOD, fed, 2)[-1]
    assert fed.excluded == []
    assert grid.asked == asked
    assert [line.endswith("was lost") for line in told] == [True]
    alone = federation(METHOD, ROWS, tmp_path / "b", workers=1)
    expected = run(METHOD, alone, 2)[-1]
    assert METHOD.params_for(state, "b").sha256() == METHOD.params_for(expected, "b").sha256()
    assert fed.transcript.bytes_down == alone.transcript.bytes_down


def test_a_node_that_is_only_slow_is_asked_once(tmp_path, monkeypatch):
    """The answer to the hello comes in the same pull as the one that was waited for, as at a node that works."""
    monkeypatch.setattr("fedfm.engines.flower.recovery.lost_messages.FIRST", 0.2)

    class Slow(Swallowed):
        held: ClassVar = []

        def _swallow(self, request, reply):
            if request.metadata.dst_node_id != NODE:
                return [reply]
            self.held.append(reply)
            if len(self.asked) == 2:  # round 1: it comes with the answer to the next hello
                return []
            out, self.held[:] = list(self.held), []
            return out

    fed = over(grid := Slow(sites(METHOD, tmp_path), set(), True))
    run(METHOD, fed, 2)
    assert fed.excluded == []
    assert grid.asked == [HELLO, TRAIN, HELLO, TRAIN]


class Cut(InProcessGrid):
    """A Grid whose SuperLink is killed while it takes one batch, and then says that it has a part already."""

    def __init__(self, apps, at: int) -> None:
        super().__init__(apps)
        self._at, self.tries = at, 0

    def push_messages(self, messages):
        self.tries += 1
        if self.tries == self._at:
            raise push_error()("ab" * 32, 1, "session")
        return super().push_messages(messages)


@pytest.mark.parametrize("at", [1, 2])  # at the hellos, and at round 1
def test_messages_that_a_killed_superlink_took_in_part_are_pushed_again(tmp_path, at):
    fed = over(grid := Cut(sites(METHOD, tmp_path / "a"), at))
    state = run(METHOD, fed, 2)[-1]
    assert fed.excluded == []
    assert (grid.tries, len(grid.sent)) == (4, 9)
    expected = run(METHOD, federation(METHOD, ROWS, tmp_path / "b", workers=1), 2)[-1]
    assert METHOD.params_for(state, "b").sha256() == METHOD.params_for(expected, "b").sha256()


def test_a_node_that_never_comes_back_is_waited_for_once(tmp_path):
    grid = Restless(sites(METHOD, tmp_path), at=3, goodbye=True, back=None)
    fed = over(grid, timeout=0.5)
    run(METHOD, fed, 4)
    assert [(e.round, e.client, e.code) for e in fed.excluded] == [(t, "b", "E_DIED") for t in (2, 3, 4)]
    assert "did not come back within 0.5 s" in fed.excluded[0].reason
    assert grid.asked == 3


class Late(InProcessGrid):
    """A Grid whose node ``b`` is connected after some looks."""

    def __init__(self, apps, looks: float) -> None:
        super().__init__(apps)
        self._left = looks

    def get_node_ids(self):
        return [node.node_id for node in self.get_nodes()]

    def get_nodes(self):
        self._left -= 1
        return [node for node in super().get_nodes() if self._left < 0 or node.node_id != NODE]


@pytest.mark.parametrize("known", [(), sorted(ROWS)])
def test_a_run_that_goes_on_waits_for_who_took_part_before(tmp_path, monkeypatch, known):
    monkeypatch.setattr("fedfm.engines.flower.greeting_link._SETTLE", 0.2)
    told = []
    grid = Late(sites(METHOD, tmp_path / "a"), looks=12)
    waits = lambda asked, missing: told.append(sorted(missing))  # noqa: E731
    fed = over(grid, expected=(), known=known, waits=waits)
    assert fed.clients == tuple(sorted(ROWS) if known else sorted(ROWS.keys() - {"b"}))
    assert (["b"] in told) == bool(known)
    state = run(METHOD, fed, 2)[-1]
    assert fed.excluded == []
    if known:
        expected = run(METHOD, federation(METHOD, ROWS, tmp_path / "b", workers=1), 2)[-1]
        assert METHOD.params_for(state, "b").sha256() == METHOD.params_for(expected, "b").sha256()


def test_an_absent_former_client_is_named_in_every_round(tmp_path, monkeypatch):
    monkeypatch.setattr("fedfm.engines.flower.greeting_link._SETTLE", 0.0)
    notices = []
    grid = Late(sites(METHOD, tmp_path), looks=float("inf"))
    fed = over(grid, expected=(), known=sorted(ROWS), gather=0.5, notice=notices.append)
    assert notices == ["no node connected for b"]
    run(METHOD, fed, 2)
    assert [(e.round, e.client, e.code) for e in fed.excluded] == [(t, "b", "E_DIED") for t in (1, 2)]


def requests(w: float, t: int = 1) -> list[Request]:
    payload = {"x": Params({"w": torch.tensor([w])}), "c": Params({"w": torch.tensor([0.0])})}
    return [Request(client, "train.Scaffold_train", payload, t, 1) for client in sorted(ROWS)]


def test_a_client_that_has_answered_is_not_asked_again_after_a_stop(tmp_path):
    def begin():
        grid = InProcessGrid(sites(METHOD, tmp_path / "sites"))
        link = FlowerLink(grid, timeout=5.0, expected=sorted(ROWS), answered=RoundReplies(tmp_path / "answered"))
        hellos = len(grid.sent)
        return link, lambda: [m.metadata.dst_node_id for m in grid.sent[hellos:]]

    link, _ = begin()
    first = link.exchange(requests(1.0))
    before = {reply.client: reply for reply in (next(first), next(first))}
    first.close()  # as if the server had been killed here
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "answered").iterdir())
    link, asked = begin()
    after = {reply.client: reply for reply in link.exchange(requests(1.0))}
    assert after.keys() == ROWS.keys()
    assert len(asked()) == 1
    for client, reply in before.items():
        assert after[client].value["delta"].sha256() == reply.value["delta"].sha256()
        assert (after[client].nbytes_up, after[client].nbytes_down) == (reply.nbytes_up, reply.nbytes_down)
    list(link.exchange(requests(2.0)))  # another payload under the same number
    assert len(asked()) == 4
    list(link.exchange(requests(2.0, t=2)))
    assert len(asked()) == 7
    assert {path.name[0] for path in (tmp_path / "answered").iterdir()} == {"2"}
    damaged = next(iter((tmp_path / "answered").iterdir()))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    list(link.exchange(requests(2.0, t=2)))
    assert len(asked()) == 8  # the one whose file is not whole


def test_a_round_with_too_many_bytes_and_a_full_disk_keep_nothing_and_stop_nothing(tmp_path, monkeypatch):
    reply = Reply("a", {"delta": Params({"w": torch.zeros(4)})}, 1, 1, 10, 20)
    first, second, _ = requests(1.0)
    kept = RoundReplies(tmp_path / "answered")
    kept.keep(first, reply)
    assert RoundReplies(tmp_path / "answered").find(first).value["delta"].sha256() == reply.value["delta"].sha256()
    monkeypatch.setattr("fedfm.engines.flower.recovery.round_replies._MOST", 30)
    kept.keep(second, reply)
    assert kept.find(first) is None
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    blocked = RoundReplies(tmp_path / "file" / "answered")  # no folder can be made here
    blocked.keep(first, reply)
    assert blocked.find(first) is None


def test_a_site_that_holds_nothing_says_so_when_a_message_refers_to_parameters():
    body = {"w": Params({"w": torch.zeros(3)}), "more": [1, "x"]}
    assert parameter_cache.refuse_references(body) is body
    with pytest.raises(ClientFault, match="this client has no cache") as told:
        parameter_cache.refuse_references({"w": {parameter_cache.KEY: "0" * 64}})
    assert told.value.code == "E_HELD"
