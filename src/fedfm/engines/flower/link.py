"""FlowerLink: messages between the server and its clients over Flower's Grid, in simulation and in deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedfm.core.messages import Reply, Request
from fedfm.core.wire import flower_records
from fedfm.engines.flower.greeting_link import POLL, GreetingLink
from fedfm.engines.flower.message_codec import EncodedPayload, InFlight, fault_reply, reply_of
from fedfm.engines.flower.private_api import SUPERLINK, message_lost, process_died, push, restarting
from fedfm.engines.flower.quiet_time import QuietTime
from fedfm.engines.flower.recovery.lost_messages import Probes
from fedfm.engines.flower.recovery.round_replies import RoundReplies
from fedfm.engines.interruption import Interrupted
from fedfm.errors import E_DIED, E_HELD, E_TIMEOUT, ClientFault

_BATCH = 16  # messages per call of the Grid
_RESTART = 60.0  # seconds that a process may take to restart after it has ended
_PAUSED = 10.0  # seconds; a longer call of the Grid does not count towards a client's time limit


class FlowerLink(GreetingLink):
    """Delivers requests as Flower messages and collects the replies in its own loop.

    Args:
        timeout: seconds that one client may take.
        gather: seconds to wait until the nodes are connected; None means ``timeout``.
        most: largest number of bytes of a reply, from :func:`fedfm.core.wire.limits.room`.
        slots: number of clients that run at the same time; 0 means all. The time limit grows with the queue.
        returns: whether a node may reconnect within the time limit; it then gets the request again.
        answered: replies of an incomplete round; their requests are not repeated.
        progress: called for every client that has finished.
        settings: as in :class:`GreetingLink`.

    Attributes:
        kept: whether clients cache their replies to training requests, each under its request's hash.
    """

    kept = False

    def __init__(
        self,
        grid: Grid,
        *,
        timeout: float,
        gather: float | None = None,
        most: int | None = None,
        slots: int = 0,
        returns: bool = False,
        answered: RoundReplies | None = None,
        progress: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        self._timeout, self._slots, self._most = timeout, slots, most
        self._returns, self._answered, self._progress = returns, answered, progress
        self._probes = Probes()
        self._cached: dict[int, frozenset[str]] = {}  # for each node, the hashes of its cached parameters
        self._resend: list[tuple[int, Request]] = []  # requests to send again, with all parameters
        self._late: set[str] = set()  # messages that timed out; late replies to them are pulled and dropped
        super().__init__(grid, gather=timeout if gather is None else gather, returns=returns, **settings)

    @property
    def straggling(self) -> bool:
        """Whether a client that timed out may still be running."""
        return bool(self._late)

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
        find = (lambda request: None) if self._answered is None else self._answered.find
        stored = {request.client: reply for request in requests if (reply := find(request)) is not None}
        if greeted := [request for request in requests if request.client not in stored]:
            self._greet_missing(greeted)
        online = self._presence.online()
        self._forget(online)
        sent, known = list[tuple[int, Request]](), list[Reply]()
        for request in requests:
            node = self._members.nodes.get(request.client)
            if request.client in self._members.barred:
                known.append(fault_reply(request, self._members.barred[request.client]))
            elif request.client in stored:
                known.append(stored[request.client])
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
                group = (self._registry.name(node) or "") if self._simulated else str(request.round)
                message = Message(record, node, kind, ttl=patience + 600, group_id=group)
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
        pause, silence = POLL[0], QuietTime()
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
                if came:
                    pause = POLL[0]
                    silence.end()
                else:
                    pause = min(pause * 1.5, silence.pause(POLL[1]))
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
