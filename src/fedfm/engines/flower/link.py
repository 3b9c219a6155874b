"""FlowerLink: messages between the server and its clients over Flower's Grid, in simulation and in deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedfm.core.client import ClientId
from fedfm.core.crossing import Crossing
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import flower_records
from fedfm.engines.flower.members import Members
from fedfm.engines.flower.message_codec import EncodedPayload, InFlight, fault_reply, reply_of
from fedfm.engines.flower.private_api import SUPERLINK, message_lost, process_died, push, restarting
from fedfm.engines.flower.recovery import parameter_cache
from fedfm.engines.flower.recovery.lost_messages import Probes
from fedfm.engines.flower.recovery.node_presence import Presence
from fedfm.engines.flower.recovery.round_replies import RoundReplies
from fedfm.engines.flower.registry import NAMELESS, Registry, node_of
from fedfm.engines.interruption import Interrupted
from fedfm.errors import (
    E_DIED,
    E_HELD,
    E_TIMEOUT,
    ClientFault,
    RunError,
)
from fedfm.privacy.exposure import HELLO

POLL = (0.05, 0.25)  # seconds between two polls for replies: first and longest
_BATCH = 16  # messages per call of the Grid
_RESTART = 60.0  # seconds that a process may take to restart after it has ended
_SETTLE = 10.0  # the run begins with the connected nodes if no new node has connected for this many seconds
_PAUSED = 10.0  # seconds; a longer call of the Grid does not count towards a client's time limit


class FlowerLink:
    """Delivers requests as Flower messages and collects the replies in its own loop.

    Each node first gets a hello. In its reply the node gives the name of its client.

    Args:
        timeout: seconds that one client may take.
        gather: seconds to wait until the nodes are connected; None means ``timeout``.
        expected: names of the expected clients; if silos have their own rows, other names may come, too.
        identity: fingerprint of the server's model; a client with another model does not take part.
        most: largest number of bytes of a reply, from :func:`fedfm.core.wire.limits.room`.
        spare: whether the Grid is a SuperLink's. If so, cached parameters are sent as their hash, and nodes have names.
        greeting: payload of the hello message to every client.
        slots: number of clients that run at the same time; 0 means all. The time limit grows with the queue.
        returns: whether a node may reconnect within the time limit; it then gets the request again.
        answered: replies of an incomplete round; their requests are not repeated.
        waits: called at intervals with the node of each client that was asked, and with the clients that have not
            answered.
        min_clients: smallest number of clients with which a run begins.
        known: clients that took part before a stop. The run continues once they are connected, or after ``gather``.
        stop: called while waiting; True raises :class:`Interrupted`.
        progress: called for every client that has finished.
        notice: called for every node that does not take part.

    Attributes:
        hellos: the transcript's entries for hello messages.
        kept: whether clients cache their replies to training requests, each under its request's hash.

    Raises:
        RunError: fewer than ``min_clients`` can take part within the time limit.
    """

    kept, _round = False, 0  # the round of later hellos

    def __init__(
        self,
        grid: Grid,
        *,
        timeout: float,
        gather: float | None = None,
        expected: Sequence[ClientId] = (),
        identity: str | None = None,
        most: int | None = None,
        spare: bool = False,
        greeting: Mapping[str, Any] | None = None,
        slots: int = 0,
        returns: bool = False,
        answered: RoundReplies | None = None,
        waits: Callable[[Mapping[ClientId, int], Collection[ClientId]], None] = lambda asked, missing: None,
        min_clients: int = 1,
        known: Collection[ClientId] = (),
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._grid, self._timeout, self._slots, self._stop = grid, timeout, slots, stop
        self._patience = timeout if gather is None else gather
        self._progress, self._notice, self._most = progress, notice, most
        self._expected, self._greeting = tuple(expected), dict(greeting or {})
        if spare:
            self._greeting[parameter_cache.NAMES] = True
        self._presence, self._returns, self._registry = Presence(grid, returns), returns, Registry(grid, spare)
        self._probes = Probes()
        self._answered, self._waits = answered, waits
        self._cached: dict[int, frozenset[str]] = {}  # for each node, the hashes of its cached parameters
        self._members = Members(self._registry, expected=expected, identity=identity, known=known, notice=notice)
        self._greeted: set[int] = set()
        self._resend: list[tuple[int, Request]] = []  # requests to send again, with all parameters
        self._late: set[str] = set()  # messages that timed out; late replies to them are pulled and dropped
        self.hellos: list[Crossing] = []
        self._crossed: Callable[[Crossing], None] = lambda crossing: None
        self._gather(min_clients)

    @property
    def clients(self) -> Sequence[ClientId]:
        """Sorted names of the expected clients, the connected clients, and those that took part before a stop."""
        return self._members.clients

    @property
    def own_data(self) -> bool:
        """Whether the silos have their own rows, rather than parts of the server's table."""
        return self._members.own_data

    @property
    def straggling(self) -> bool:
        """Whether a client that timed out may still be running."""
        return bool(self._late)

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

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver requests; yield replies as clients finish. A client that is absent or late gets a fault."""
        if self._stop():
            raise Interrupted
        sent, known = self._assign_nodes(requests)
        yield from known
        asked = {request.client: request for _, request in sent}
        for reply in self._answers(sent):
            if self._answered is not None and reply.fault is None and reply.client in asked:
                self._answered.keep(asked.pop(reply.client), reply)
            yield reply

    def _assign_nodes(self, requests: Sequence[Request]) -> tuple[list[tuple[int, Request]], list[Reply]]:
        """Find each request's node. Returns (node, request) pairs, and replies that are already known.

        A known reply is a stored reply, or a fault for a client that cannot be asked.
        """
        if any(r.client not in self._members.nodes and r.client not in self._members.barred for r in requests):
            self._greet()
        online = self._presence.online()
        self._forget(online)
        sent, known = list[tuple[int, Request]](), list[Reply]()
        for request in requests:
            node = self._members.nodes.get(request.client)
            if request.client in self._members.barred:
                known.append(fault_reply(request, self._members.barred[request.client]))
            elif self._answered is not None and (reply := self._answered.find(request)) is not None:
                known.append(reply)
            elif node is None or not self._presence.expects(node, online):
                known.append(fault_reply(request, ClientFault(E_DIED, "no node of that name is connected")))
            else:
                sent.append((node, request))
        return sent, known

    def _answers(self, sent: Sequence[tuple[int, Request]]) -> Iterator[Reply]:
        """Deliver requests; repeat a request if the client lost its cached parameters or its process died."""
        ended: list[tuple[int, Request]] = []
        yield from self._deliver(sent, ended, process_died)
        if self._resend:
            complete, self._resend = self._resend, []
            yield from self._deliver(complete, ended, process_died)
        begun = time.monotonic()
        while ended:  # repeat requests until new processes have replaced those that ended
            retried, ended = ended, []
            patient = time.monotonic() - begun < _RESTART
            yield from self._deliver(retried, ended if patient else None, restarting)
            if ended:
                time.sleep(POLL[1])

    def _forget(self, online: Mapping[int, str]) -> None:
        """Forget the cache of every node that has reconnected."""
        for node in [node for node in self._cached if self._presence.has_reconnected(node, online)]:
            del self._cached[node]

    def _deliver(
        self,
        sent: Sequence[tuple[int, Request]],
        ended: list[tuple[int, Request]] | None = None,
        again: Callable[[Any], bool] = process_died,
    ) -> Iterator[Reply]:
        """Send requests and collect replies. A request whose error satisfies ``again`` joins ``ended`` and gets no
        fault.
        """
        waiting: dict[str, InFlight] = {}
        patience = self._timeout * (-(-len(sent) // self._slots) if self._slots else 1)
        yield from self._push(sent, waiting, patience)
        yield from self._collect(waiting, time.monotonic() + patience, ended, again)

    def _push(
        self, sent: Sequence[tuple[int, Request]], waiting: dict[str, InFlight], patience: float
    ) -> Iterator[Reply]:
        """Send requests and add them to ``waiting``; yield a fault for each request that the SuperLink rejects."""
        encoded: EncodedPayload | None = None
        for start in range(0, len(sent), _BATCH):
            messages = []
            for node, request in sent[start : start + _BATCH]:
                if encoded is None or encoded.payload is not request.payload:  # a broadcast is encoded once
                    kept = self.kept and request.handler.startswith("train.")
                    encoded = EncodedPayload(request, any(self._cached.values()), kept)
                record, spared, known_as = encoded.without(self._cached.get(node, frozenset()))
                kind = flower_records.message_type(request.handler)
                message = Message(record, node, kind, ttl=patience + 600, group_id=str(request.round))
                one = InFlight(node, request, encoded.nbytes, spared, self._presence.since(node), known_as)
                messages.append((message, one))
            taken = push(self._grid, [message for message, _ in messages])
            for message, one in messages:
                name = message.metadata.message_id
                if name in taken:
                    waiting[name] = one
                else:
                    yield fault_reply(one.request, ClientFault(E_DIED, "the SuperLink did not accept the message"))

    def _collect(
        self,
        waiting: dict[str, InFlight],
        deadline: float,
        ended: list[tuple[int, Request]] | None,
        again: Callable[[Any], bool],
    ) -> Iterator[Reply]:
        pause = POLL[0]
        done: dict[str, InFlight] = {}
        away: list[InFlight] = []  # requests lost on the way or with their nodes
        asked = {one.request.client: one.node for one in waiting.values()}
        while waiting or away:
            begun = time.monotonic()
            suspects, names = self._probes.suspects, [*waiting, *self._late, *self._probes.names]
            came = list(self._grid.pull_messages(names)) if names else []
            # If the SuperLink did not respond for a long time, clients get this time in addition.
            if (took := time.monotonic() - begun) > _PAUSED:
                deadline += took
            for message in came:
                name = message.metadata.reply_to_message_id
                self._late.discard(name)
                known = waiting.get(name) or done.get(name)
                self._take_probe_reply(message)
                if known is None or message.metadata.src_node_id not in (known.node, SUPERLINK):
                    continue  # an unknown message, or a reply from another node
                if self._returns and name in waiting and message.has_error() and message_lost(message.error):
                    away.append(waiting.pop(name))
                    continue
                if ended is not None and name in waiting and message.has_error() and again(message.error):
                    ended.append(waiting.pop(name)[:2])
                    continue
                reply, self._cached[known.node] = reply_of(message, known, self._most)
                if reply.fault is not None and reply.fault.code == E_HELD and name in waiting and known.spared:
                    self._resend.append(waiting.pop(name)[:2])
                    continue
                if name in waiting:
                    done[name] = waiting.pop(name)
                    self._progress()
                yield reply
            if self._stop():
                self._late.update(waiting)
                raise Interrupted
            if (waiting or away) and time.monotonic() > deadline:
                self._late.update(waiting)
                self._presence.give_up(one.node for one in (*waiting.values(), *away))
                for late in waiting.values():
                    yield fault_reply(late.request, ClientFault(E_TIMEOUT, f"no reply within {self._timeout:g} s"))
                for gone in away:
                    reason = f"its node disconnected and did not come back within {self._timeout:g} s"
                    yield fault_reply(gone.request, ClientFault(E_DIED, reason))
                break
            if self._returns:
                again_now = self._take_lost(waiting, away, suspects)
                yield from self._push(again_now, waiting, max(deadline - time.monotonic(), 1.0))
                self._probe(waiting)
            self._waits(asked, {one.request.client for one in (*waiting.values(), *away)})
            if waiting or away:
                time.sleep(pause)
                pause = POLL[0] if came else min(pause * 1.5, POLL[1])
        self._waits(asked, ())

    def _take_lost(
        self, waiting: dict[str, InFlight], away: list[InFlight], suspects: Collection[str]
    ) -> list[tuple[int, Request]]:
        """Remove and return the requests to send again: those that were lost, and those that were sent before their
        node reconnected.

        A client's memory is versioned by (round, call), so a second answer equals the first.
        """
        found = [waiting.pop(name) for name in self._confirm_lost(waiting, suspects)]
        if (online := self._presence.look()) is not None:
            anew = [n for n, one in waiting.items() if one.since and online.get(one.node, one.since) != one.since]
            found += [waiting.pop(name) for name in anew] + [one for one in away if one.node in online]
            away[:] = [one for one in away if one.node not in online]
        for one in found:
            self._cached.pop(one.node, None)
        return [one[:2] for one in found]

    def _confirm_lost(self, waiting: Mapping[str, InFlight], suspects: Collection[str]) -> list[str]:
        """The requests in ``suspects`` to which the last pull brought no reply; the operator gets a notice for each."""
        found = [name for name in waiting if name in suspects]
        for name in found:
            self._notice(
                f"{waiting[name].request.client} gets its request again, since the request or the reply was lost"
            )
        return found

    def _probe(self, waiting: Mapping[str, InFlight]) -> None:
        """Send a hello to nodes that have been silent for long."""
        hellos: dict[str, InFlight] = {}
        due = self._probes.due(waiting, self._presence.last_online)
        for _ in self._push([self._hello(node) for node in due], hellos, self._timeout):
            pass  # if the SuperLink rejects a probe, a later one follows
        self._probes.enter(hellos)

    def _take_probe_reply(self, message: Message) -> None:
        """Process the message if it is the reply to a probe; otherwise do nothing."""
        if (hello := self._probes.take_reply(message)) is not None:
            clients = [client for client, node in self._members.nodes.items() if node == hello.node]
            self._enter_hello(clients[0] if clients else hello.request.client, reply_of(message, hello, self._most)[0])

    # --- hello --------------------------------------------------------------------------------------------------------

    def _gather(self, min_clients: int) -> None:
        """Wait for the expected nodes, or for enough nodes and a pause without new ones.

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
            enough = count >= max(min_clients, 1) and now - changed > _SETTLE
            if (self._expected and count >= len(self._expected)) or enough or now - begun > self._patience:
                break
            time.sleep(0.1)
        self._greet()
        while (away := self._members.missing_again) and time.monotonic() - begun < self._patience:
            self._waits(self._members.nodes, away)
            if self._stop():
                raise Interrupted
            time.sleep(POLL[1])
            self._greet()
        self._waits(self._members.nodes, ())
        able = len(self._members.nodes)
        if able < min_clients:
            text = f"{able} of {count} connected nodes can take part, min_clients is {min_clients}"
            why = "; ".join(f"{name}: {fault}" for name, fault in sorted(self._members.absent.items()))
            raise RunError(f"{text} ({why})" if why else text)
        if self._registry.nameless(self._members.nodes.values()):
            self._notice(NAMELESS)
        if missing := self._members.missing:
            self._notice(f"no node connected for {', '.join(missing)}")

    def _greet(self) -> None:
        """Send a hello to each node that has not received one."""
        new = self._registry.identify(node for node in self._presence.online() if node not in self._greeted)
        if not new:
            return
        self._greeted.update(new)
        self._meet(list(self._deliver([self._hello(node) for node in new])))

    def _hello(self, node: int) -> tuple[int, Request]:
        return node, Request(f"node {node}", HELLO, self._greeting, 0, 0)

    def _meet(self, replies: Iterable[Reply]) -> None:
        """Admit clients from their replies to hellos."""
        for name, reply in self._members.admit(replies):
            self._enter_hello(name, reply)

    def _enter_hello(self, name: ClientId, reply: Reply) -> None:
        for sender, receiver, nbytes in (("server", name, reply.nbytes_down), (name, "server", reply.nbytes_up)):
            self.hellos.append(Crossing(self._round, sender, receiver, HELLO, nbytes, "plain", counted=False))
            self._crossed(self.hellos[-1])
