"""Finds requests or replies that were lost on the way. Flower does not report this: it counts them as delivered.

A SuperNode takes the next message only after it has answered the one before. So if a node answers a hello and an
earlier request is still unanswered, that request or its reply was lost.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr.app import Message

from fedfm.engines.flower.message_codec import InFlight

FIRST = 30.0  # seconds of silence before the first hello, or twice the longest reply time of this handler
_FACTOR = 2  # by which the pause grows: during a long computation the hellos wait at the node


@dataclass
class _Silence:
    """A request that is not answered yet.

    Attributes:
        since: when it was sent.
        until: when its node gets the next hello.
        pause: seconds between the last hello and that one.
        suspected: its node has answered a hello that was sent after it.
    """

    one: InFlight
    since: float
    until: float
    pause: float
    suspected: bool = False


class Probes:
    """The hellos to nodes that are silent."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}  # by request
        self._slowest: dict[str, float] = {}  # by handler: seconds of the slowest answer
        self._sent: dict[str, tuple[InFlight, list[str]]] = {}  # by hello: it, and what was sent to its node before

    @property
    def names(self) -> Collection[str]:
        """The hellos whose answers are awaited."""
        return list(self._sent)

    @property
    def suspects(self) -> set[str]:
        """Requests that are lost if the next pull does not bring their answers."""
        return {name for name, silence in self._silent.items() if silence.suspected}

    def take_reply(self, message: Message) -> InFlight | None:
        """Take in the answer to a hello; returns the hello, or None if the message answers none."""
        name = message.metadata.reply_to_message_id
        if name not in self._sent:
            return None
        hello, before = self._sent.pop(name)
        if not message.has_error() and message.metadata.src_node_id == hello.node:
            for request in self._silent.keys() & before:
                self._silent[request].suspected = True
        return hello

    def due(self, waiting: Mapping[str, InFlight], online: Collection[int]) -> list[int]:
        """Connected nodes that have been silent for long. Call it with all requests that are in flight."""
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
        """Record sent hellos, after the requests of the last call of :meth:`due`."""
        for name, hello in hellos.items():
            self._sent[name] = hello, [n for n, silence in self._silent.items() if silence.one.node == hello.node]
