"""A FlowerLink for buffered asynchronous rounds, in which the server continues before all clients have replied.

After a restart the server does not repeat requests to clients that have replied or still compute; see
:mod:`fedfm.engines.flower.recovery.pending_requests`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedfm.core.client import ClientId
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec, flower_records
from fedfm.engines.flower.greeting_link import POLL
from fedfm.engines.flower.link import FlowerLink
from fedfm.engines.flower.message_codec import InFlight, fault_reply, reply_of
from fedfm.engines.flower.private_api import SUPERLINK, push
from fedfm.engines.flower.quiet_time import QuietTime
from fedfm.engines.flower.recovery import last_reply
from fedfm.engines.flower.recovery.pending_requests import PendingRequests, SentRequest
from fedfm.engines.interruption import Interrupted
from fedfm.errors import E_DIED, E_HELD, E_TIMEOUT, ClientFault


class FlowerStream(FlowerLink):
    """A link for asynchronous rounds: it yields replies as they arrive and keeps other requests in flight.

    Args:
        outstanding: store of pending requests; it may contain those of an earlier server process, and gets new ones.
        settings: as in :class:`FlowerLink`.
    """

    streams, kept = True, True

    def __init__(self, grid: Grid, *, outstanding: PendingRequests, **settings: Any) -> None:
        self._in_flight: dict[str, tuple[InFlight, float]] = {}  # for each message: its request and deadline
        self._ready: list[Reply] = []  # replies that were pulled, but not yet yielded; the SuperLink no longer has them
        self._outstanding = outstanding
        self._restored: dict[ClientId, tuple[int, int]] = {}
        # Hellos to busy nodes; the run starts without their replies.
        self._unmet: dict[str, tuple[InFlight, ClientId]] = {}
        # For each message that fetches a cached reply: the request to send if there is no such reply.
        self._anew: dict[str, Request] = {}
        super().__init__(grid, **settings)

    @property
    def straggling(self) -> bool:
        """Whether a client may still be running although it timed out or the server no longer waits for it."""
        return super().straggling or bool(self._in_flight)

    @property
    def requests_in_flight(self) -> Mapping[ClientId, tuple[int, int]]:
        sent = {one.request.client: (one.request.round, one.request.call) for one, _ in self._in_flight.values()}
        return sent | {reply.client: (reply.round, reply.call) for reply in self._ready}

    def restore(self, awaited: Mapping[ClientId, tuple[int, int]]) -> None:
        self._restored = dict(awaited)

    def stream(self, requests: Sequence[Request], again: Callable[[ClientId], Request]) -> Iterator[Reply]:
        """Deliver requests, and yield each reply when it arrives. A reply may answer a request of an earlier call.

        One call yields at most one reply per client, and ends once it has a reply of every client with a request in
        flight. If a reply answers an older request than ``again(name)``, the client gets this newer request at once,
        while other requests are in flight. The next call yields the reply to the newer request. A client that is
        absent, dies or is late gets a fault, and may get another request.
        """
        if self._stop():
            raise Interrupted
        self._send(requests)
        pause, silence, replied = POLL[0], QuietTime(), set[ClientId]()
        while self.requests_in_flight.keys() - replied:
            for reply in [reply for reply in self._ready if reply.client not in replied]:
                self._ready.remove(reply)
                replied.add(reply.client)
                self._progress()
                yield reply
                if reply.fault is None and (request := again(reply.client)).round > reply.round:
                    self._send([request])
            suspects = self._probes.suspects
            came = list(self._grid.pull_messages([*self._in_flight, *self._late, *self._unmet, *self._probes.names]))
            for message in came:
                self._take_reply(message)
            if self._stop():
                raise Interrupted
            if self._returns:
                self._find_lost(suspects)
            now = time.monotonic()
            for name in [name for name, (_, deadline) in self._in_flight.items() if now > deadline]:
                late, _ = self._in_flight.pop(name)
                self._late.add(name)
                self._anew.pop(name, None)
                self._ready.append(
                    fault_reply(late.request, ClientFault(E_TIMEOUT, f"no reply within {self._timeout:g} s"))
                )
            if not came:
                time.sleep(pause)
                pause = min(pause * 1.5, silence.pause(POLL[1]))
            else:
                pause = POLL[0]
                silence.end()

    def _send(self, requests: Sequence[Request]) -> None:
        """Send requests, except those that an earlier server process has sent already.

        If the disk has the reply to such a request, take this reply. Stored replies are ready at once, and so are
        faults of clients that cannot be asked.
        """
        known = {one.client: before for one in requests if (before := self._sent_before(one)) is not None}
        found = [self._outstanding.answer(client, before) for client, before in known.items()]
        pulled = sorted((r for r in found if r is not None), key=lambda reply: (reply.round, reply.call, reply.client))
        there = {reply.client for reply in pulled}
        sent, absent = self._assign_nodes([request for request in requests if request.client not in there])
        self._ready += [*pulled, *absent]
        self._ready += self._launch([(node, request) for node, request in sent if request.client not in known])
        self._ready += self._recall([(node, request) for node, request in sent if request.client in known], known)

    def _take_reply(self, message: Message) -> None:
        """Process a message pulled from the SuperLink."""
        name = message.metadata.reply_to_message_id
        self._late.discard(name)
        self._take_probe_reply(message)
        if name in self._unmet:
            self._met_late(message, *self._unmet.pop(name))
        if name not in self._in_flight:
            return
        one, _ = self._in_flight[name]
        if message.metadata.src_node_id not in (one.node, SUPERLINK):
            return  # the reply is from another node
        del self._in_flight[name]
        anew = self._anew.pop(name, None)
        reply, self._cached[one.node] = reply_of(message, one, self._most)
        if reply.fault is not None and reply.fault.code == E_HELD and (one.spared or anew is not None):
            self._ready.extend(self._launch([(one.node, one.request if anew is None else anew)]))  # with all parameters
            return
        self._outstanding.keep(reply.client, reply)
        self._ready.append(reply)

    def _find_lost(self, suspects: Collection[str]) -> None:
        """Send lost requests again, and probe nodes that have been silent for long."""
        waiting = {name: one for name, (one, _) in self._in_flight.items()}
        for name in self._confirm_lost(waiting, suspects):
            one, _ = self._in_flight.pop(name)
            self._cached.pop(one.node, None)
            self._ready.extend(self._launch([(one.node, self._anew.pop(name, one.request))]))
        self._presence.look()  # update the connected nodes before hellos are sent
        self._probe({name: one for name, (one, _) in self._in_flight.items()})

    def _launch(self, sent: Sequence[tuple[int, Request]]) -> Iterator[Reply]:
        """Send requests for :meth:`stream`; yield a fault for each request that the SuperLink rejected."""
        waiting: dict[str, InFlight] = {}
        yield from self._push(sent, waiting, self._timeout)
        self._in_flight |= {name: (one, time.monotonic() + self._timeout) for name, one in waiting.items()}
        if waiting:
            self._outstanding.enter({one.request.client: self._entry(one) for one in waiting.values()})

    def _entry(self, one: InFlight) -> SentRequest:
        request = one.request
        digest = self._outstanding.digest.of(request)
        return SentRequest(
            one.node, request.round, request.call, request.handler, digest, one.name, one.nbytes, one.spared
        )

    # --- after a stop -------------------------------------------------------------------------------------------------

    def _sent_before(self, request: Request) -> SentRequest | None:
        """The request that an earlier server process sent in place of this one, or None.

        For a client whose reply was missing at the last commit, this is the request that was pending then. For any
        other client it is the same request, sent in a round that was not completed.
        """
        at = self._restored.pop(request.client, None)
        sent = [one for one in self._outstanding.last_requests(request.client) if one.handler == request.handler]
        awaited = [one for one in sent if one.at == at]
        return next(iter(awaited or [one for one in sent if self._is(one, request)]), None)

    def _is(self, sent: SentRequest, request: Request) -> bool:
        return sent.at == (request.round, request.call) and sent.payload == self._outstanding.digest.of(request)

    def _greet(self, asked: Collection[ClientId]) -> None:
        """Send hellos. Do not wait for clients that still work on a request of an earlier server process.

        The node of such a client is identified by the key of its connection, and by the name that it gave to the
        earlier process.
        """
        online = self._presence.online()
        busy = {node: client for node, client in self._outstanding.at_work().items() if node in online}
        busy = {node: client for node, client in busy.items() if node not in self._greeted}
        if busy and online.keys() - busy.keys():  # otherwise wait for all nodes
            self._greeted.update(busy)
            waiting: dict[str, InFlight] = {}
            unsent = [
                reply.client for reply in self._push([self._hello(node) for node in busy], waiting, self._timeout)
            ]
            self._unmet |= {name: (one, busy[one.node]) for name, one in waiting.items()}
            self._members.nodes |= {client: node for node, client in busy.items() if f"node {node}" not in unsent}
        super()._greet(asked)

    def _met_late(self, message: Message, one: InFlight, client: ClientId) -> None:
        reply, self._cached[one.node] = reply_of(message, one, self._most)
        if reply.fault is not None and reply.fault.code == E_DIED:
            return  # the hello or its reply was lost; the client stays identified
        self._members.nodes.pop(client, None)
        self._registry.look()
        self._meet([reply])

    def _recall(self, sent: Sequence[tuple[int, Request]], known: Mapping[ClientId, SentRequest]) -> Iterator[Reply]:
        """Fetch the clients' cached or unfinished replies; a client without such a reply gets its request again."""
        for node, request in sent:
            before = known[request.client]
            body = last_reply.reference(before.name)
            record = codec.to_record(codec.envelope(*before.at, body))
            kind = flower_records.message_type(request.handler)
            message = Message(record, node, kind, ttl=self._timeout + 600, group_id=str(request.round))
            taken = push(self._grid, [message])
            if (name := message.metadata.message_id) not in taken:
                yield from self._launch([(node, request)])
                continue
            former = Request(request.client, request.handler, {}, *before.at)
            nbytes = before.nbytes + codec.weigh(body)
            one = InFlight(node, former, nbytes, before.spared, self._presence.since(node), before.name)
            self._in_flight[name], self._anew[name] = (one, time.monotonic() + self._timeout), request
