"""The hellos of a FlowerLink: each node gets one before its first request, and answers with the name of its client."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from fedfm.core.client import ClientId
from fedfm.core.crossing import Crossing
from fedfm.core.messages import Reply, Request
from fedfm.engines.flower.members import Members
from fedfm.engines.flower.recovery import parameter_cache
from fedfm.engines.flower.recovery.node_presence import Presence
from fedfm.engines.flower.registry import NAMELESS, Registry, node_of
from fedfm.engines.interruption import Interrupted
from fedfm.errors import E_DIED, E_TIMEOUT, RunError
from fedfm.privacy.exposure import HELLO

POLL = (0.05, 0.25)  # seconds between two polls for replies: first and longest
_SETTLE = 10.0  # the run begins with the connected nodes if no new node has connected for this many seconds


class GreetingLink:
    """Finds the clients of a run among the nodes of a Grid, and greets them.

    All nodes get their hello before the run begins, or each node when its client is first asked (``lazy``). A lazy
    link knows the clients by the names under which their keys are registered. Before the run it greets the nodes
    without such a name, and others until one takes part: its reply tells whether silos have their own rows.

    Args:
        gather: seconds to wait until the nodes are connected.
        expected: names of the expected clients; if silos have their own rows, other names may come, too.
        identity: fingerprint of the server's model; a client with another model does not take part.
        spare: whether the Grid is a SuperLink's. If so, cached parameters are sent as their hash, and nodes have names.
        lazy: whether a node gets its hello when its client is first asked.
        simulated: whether any node can answer for any client, as in a simulation. Then the link gives each client a
            node, and the node's messages have the client's name; such a link is lazy.
        greeting: payload of the hello message to every client.
        returns: whether a node may reconnect within the time limit; it then gets the request again.
        waits: called at intervals with the node of each client that was asked, and with the clients that have not
            answered.
        min_clients: smallest number of clients with which a run begins.
        known: clients that took part before a stop. The run continues once they are connected, or after ``gather``.
        stop: called while waiting; True raises :class:`Interrupted`.
        notice: called for every node that does not take part.

    Attributes:
        hellos: the transcript's entries for hello messages.

    Raises:
        RunError: fewer than ``min_clients`` can take part within the time limit.
    """

    _round = 0  # the round of later hellos

    def __init__(
        self,
        grid: Grid,
        *,
        gather: float,
        expected: Sequence[ClientId] = (),
        identity: str | None = None,
        spare: bool = False,
        lazy: bool = False,
        simulated: bool = False,
        greeting: Mapping[str, Any] | None = None,
        returns: bool = False,
        waits: Callable[[Mapping[ClientId, int], Collection[ClientId]], None] = lambda asked, missing: None,
        min_clients: int = 1,
        known: Collection[ClientId] = (),
        stop: Callable[[], bool] = lambda: False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._grid, self._patience, self._stop, self._waits, self._notice = grid, gather, stop, waits, notice
        self._lazy, self._simulated = lazy or simulated, simulated
        self._expected, self._greeting = tuple(expected), dict(greeting or {})
        if spare:
            self._greeting[parameter_cache.NAMES] = True
        self._presence = Presence(grid, returns)
        self._registry = Registry(grid, spare)
        self._members = Members(
            self._registry, expected=expected, identity=identity, known=known, notice=notice, again=self._lazy
        )
        self._greeted: set[int] = set()
        self.hellos: list[Crossing] = []
        self._crossed: Callable[[Crossing], None] = lambda crossing: None
        self._gather(min_clients)
        self._members.gathered = True

    @property
    def clients(self) -> Sequence[ClientId]:
        """Sorted names of the expected clients, the connected clients, and those that took part before a stop."""
        return self._members.clients

    @property
    def own_data(self) -> bool:
        """Whether the silos have their own rows, rather than parts of the server's table."""
        return self._members.own_data

    def greet(self, more: Mapping[str, Any]) -> None:
        """Send another hello to all clients. From now on all hellos have these entries, too.

        A client that refuses it takes no further part. A client whose node is away gets it when the node is back.
        """
        self._greeting |= more
        names = {node: name for name, node in self._members.nodes.items()}
        for reply in list(self._deliver([self._hello(node) for node in names])):
            self._enter_hello(name := names[node_of(reply)], reply)
            if reply.fault is not None:
                self._members.leave(name, reply.fault)
                if reply.fault.code in (E_DIED, E_TIMEOUT):
                    self._greeted.discard(node_of(reply))

    def record(self, add: Callable[[Crossing], None]) -> None:
        """Record past and future hellos in the transcript."""
        for crossing in self.hellos:
            add(crossing)
        self._crossed = add

    def _deliver(self, sent: Sequence[tuple[int, Request]]) -> Iterator[Reply]:
        """Send requests to nodes, and collect the replies."""
        raise NotImplementedError

    def _gather(self, min_clients: int) -> None:
        """Wait for the expected nodes, or for enough nodes and a pause without new ones; then greet.

        If the run is resumed after a stop, also wait for the clients that took part before the stop.
        """
        begun = changed = time.monotonic()
        count = -1
        while True:
            if self._stop():
                raise Interrupted
            now, there = time.monotonic(), len(set(self._grid.get_node_ids()))
            if there != count:
                count, changed = there, now
            enough = count >= max(min_clients, 1) and now - changed > _SETTLE and not self._simulated
            if (self._expected and count >= len(self._expected)) or enough or now - begun > self._patience:
                break
            time.sleep(0.1)
        if self._simulated:
            self._assign(count)
            return
        self._greet(())
        tried = set[ClientId]()
        while not self._members.nodes and (rest := sorted(self._members.connected - tried)):
            tried.update(few := rest[: len(tried) + 1])
            self._greet(few)
        while (away := self._members.missing_again) and time.monotonic() - begun < self._patience:
            self._waits(self._members.nodes, away)
            if self._stop():
                raise Interrupted
            time.sleep(POLL[1])
            self._greet(())
        self._waits(self._members.nodes, ())
        able = len(self._members.nodes and self._members.nodes.keys() | self._members.connected)
        if able < min_clients:
            text = f"{able} of {count} connected nodes can take part, min_clients is {min_clients}"
            why = "; ".join(f"{name}: {fault}" for name, fault in sorted(self._members.absent.items()))
            raise RunError(f"{text} ({why})" if why else text)
        if self._registry.nameless(self._members.nodes.values()):
            self._notice(NAMELESS)
        if missing := self._members.missing:
            self._notice(f"no node connected for {', '.join(missing)}")

    def _assign(self, count: int) -> None:
        """Give each client of a simulation a node."""
        if count < len(self._expected):
            raise RunError(f"Flower's simulation made {count} of {len(self._expected)} nodes")
        self._registry.enter(dict(zip(self._grid.get_node_ids(), self._expected, strict=False)))

    def _greet(self, asked: Collection[ClientId]) -> None:
        """Send a hello to each node that has not received one; a lazy link only to those of the clients ``asked``, and
        to nodes whose keys have no name.
        """
        new = self._registry.identify(node for node in self._presence.online() if node not in self._greeted)
        named = {node: name for node in new if self._lazy and (name := self._registry.name(node)) is not None}
        self._members.connected = {*named.values()}
        if not (new := [node for node in new if node not in named or named[node] in asked]):
            return
        self._greeted.update(new)
        self._meet(list(self._deliver([self._hello(node) for node in new])))
        self._members.connected = {name for node, name in named.items() if node not in self._greeted}

    def _greet_missing(self, requests: Sequence[Request]) -> None:
        """Greet the clients of these requests that have not answered a hello."""
        self._round, members = requests[0].round, self._members
        asked = {request.client for request in requests}.difference(members.nodes)
        if asked := {client for client in asked if client not in members.barred or members.is_silent(client)}:
            self._greet(asked)

    def _hello(self, node: int) -> tuple[int, Request]:
        return node, Request(f"node {node}", HELLO, self._greeting, 0, 0)

    def _meet(self, replies: Iterable[Reply]) -> None:
        """Admit clients from their replies to hellos."""
        replies = list(replies)
        for name, reply in self._members.admit(replies):
            self._enter_hello(name, reply)
        if self._lazy:  # a node that did not answer gets another hello with its client's next request
            late = (reply for reply in replies if reply.fault is not None and reply.fault.code in (E_DIED, E_TIMEOUT))
            self._greeted.difference_update(node_of(reply) for reply in late)

    def _enter_hello(self, name: ClientId, reply: Reply) -> None:
        for sender, receiver, nbytes in (("server", name, reply.nbytes_down), (name, "server", reply.nbytes_up)):
            self.hellos.append(Crossing(self._round, sender, receiver, HELLO, nbytes, "plain", counted=False))
            self._crossed(self.hellos[-1])
