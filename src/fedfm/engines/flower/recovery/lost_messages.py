"""Find requests or replies that were lost on the way. Flower counts them as delivered and does not report them.

A SuperNode takes its next message only after it has replied to the previous one. So if a node answers a hello while an
earlier request has no reply, that request or its reply is lost.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message

from fedfm.engines.flower.message_codec import InFlight

FIRST = 30.0  # seconds of silence before the first hello; twice the handler's longest reply time if that is more
_FACTOR = 2  # pauses grow by this factor, since hellos queue at a node during a long computation


@dataclass
class _Silence:
    """A request to which no reply has come.

    Attributes:
        since: when the request was sent.
        until: when its node gets the next hello.
        pause: seconds from the last hello to the next.
        suspected: whether its node has answered a hello that was sent later than the request.
    """

    one: InFlight
    since: float
    until: float
    pause: float
    suspected: bool = False


class Probes:
    """The hellos to nodes from which no reply comes."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}  # by request
        self._slowest: dict[str, float] = {}  # for each handler, the seconds of the slowest reply
        # For each sent hello: the hello, and the names of earlier requests to the same node.
        self._sent: dict[str, tuple[InFlight, list[str]]] = {}

    @property
    def names(self) -> Collection[str]:
        """The hellos to which no answer has come yet."""
        return list(self._sent)

    @property
    def suspects(self) -> set[str]:
        """Requests that count as lost if the next pull brings no reply to them."""
        return {name for name, silence in self._silent.items() if silence.suspected}

    def take_reply(self, message: Message) -> InFlight | None:
        """Process the message if it answers a hello; returns that hello, or None for any other message."""
        name = message.metadata.reply_to_message_id
        if name not in self._sent:
            return None
        hello, before = self._sent.pop(name)
        if not message.has_error() and message.metadata.src_node_id == hello.node:
            for request in self._silent.keys() & before:
                self._silent[request].suspected = True
        return hello

    def due(self, waiting: Mapping[str, InFlight], online: Collection[int]) -> list[int]:
        """Connected nodes that have been silent for long. ``waiting`` has all requests without a reply."""
        now = time.monotonic()
        for name in self._silent.keys() - waiting.keys():
            over = self._silent.pop(name)
            if not over.suspected:
                handler = over.one.request.handler
                self._slowest[handler] = max(self._slowest.get(handler, 0.0), now - over.since)
        due = set[int]()
        for name, one in waiting.items():
            pause = max(FIRST, 2 * self._slowest.get(one.request.handler, 0.0))
            silence = self._silent.setdefault(name, _Silence(one, now, now + pause, pause))
            if now > silence.until and one.node in online:
                silence.pause *= _FACTOR
                silence.until = now + silence.pause
                due.add(one.node)
        return sorted(due)

    def enter(self, hellos: Mapping[str, InFlight]) -> None:
        """Record the sent hellos; they were sent after the requests that the last call of :meth:`due` received."""
        for name, hello in hellos.items():
            self._sent[name] = hello, [n for n, silence in self._silent.items() if silence.one.node == hello.node]
