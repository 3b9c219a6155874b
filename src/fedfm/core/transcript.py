"""Transcript: sender, receiver, form and size of every message."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple

from fedfm.core.messages import Reply

MANY = 1000  # a run with more clients lists names as ranges, and rows as sums


class Crossing(NamedTuple):
    """One message that crossed a trust boundary.

    Attributes:
        round: 1, 2, ... for training rounds, 0 before the first.
        sender, receiver: "server" or a client's name.
        handler: ``kind.Class_function``. The server sees ``train`` replies in the aggregation's form, and ``query``
            replies one by one. The aggregation sends ``aggregate``. Evaluation sends ``scores`` and ``reveal``.
        nbytes: size of the message in Flower's serialised records, the same on every engine.
        form: what the receiver sees: plain, masked or encrypted values.
        counted: whether the message counts as the method's own. Hellos, evaluation and messages to a client that trains
            alone are listed, but do not count.
        call: number of the call in its round; all replies to one call go into the same mean.
        spared: bytes saved: the part of ``nbytes`` that was not sent, because the receiver already had it.
        part: the rows that a request is about, test or val; "" if the handler has no such argument.
    """

    round: int
    sender: str
    receiver: str
    handler: str
    nbytes: int
    form: str
    counted: bool
    call: int = 0
    spared: int = 0
    part: str = ""

    def line(self) -> str:
        """A line of ``messages.jsonl``."""
        keys = ("round", "from", "to", "handler", "bytes", "form", "counted", "call", "spared", "part")
        line = dict(zip(keys, self, strict=True))
        for key in ("spared", "part"):
            if not line[key]:
                del line[key]
        return json.dumps(line)


@dataclass
class Transcript:
    """Crossings since the last commit, which a run appends to ``messages.jsonl``, and totals since the start."""

    pending: list[Crossing] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, crossing: Crossing) -> None:
        self.pending.append(crossing)
        if crossing.counted:
            if crossing.receiver == "server":
                self.bytes_up += crossing.nbytes
            else:
                self.bytes_down += crossing.nbytes

    def add_exchange(
        self, reply: Reply, handler: str, round: int, call: int, *, form: str, down: str, counted: bool, part: str
    ) -> None:
        """Add a request and its reply; if the client sent no message, add only the request.

        Args:
            handler: the request's handler, with its kind.
            form, down: the form in which the server sees the reply, and that in which the client sees the request.
            part: part of the rows that the request is about.
        """
        client, spared = reply.client, reply.spared
        self.add(Crossing(round, "server", client, handler, reply.nbytes_down, down, counted, call, spared, part))
        if reply.nbytes_up:
            self.add(Crossing(round, client, "server", handler, reply.nbytes_up, form, counted, call))

    def drain(self) -> list[Crossing]:
        pending, self.pending = self.pending, []
        return pending
