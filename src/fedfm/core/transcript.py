"""Transcript: sender, receiver, form and size of every message."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfm.core.crossing import Crossing
from fedfm.core.messages import Reply

MANY = 1000  # a run with more clients lists names as ranges, and rows as sums


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
