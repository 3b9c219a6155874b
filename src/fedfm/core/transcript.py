"""Transcript: who sent what to whom, in what form, and how many bytes it took."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import NamedTuple


class Crossing(NamedTuple):
    """One message that crossed a trust boundary.

    Attributes:
        round: 1, 2, ... for training rounds, 0 before the first.
        sender, receiver: "server" or a client's name.
        handler: ``kind.Class_function``. The server sees ``train`` replies as the aggregation shows them, ``query``
            replies one by one; ``aggregate`` is the aggregation's own, ``scores`` and ``reveal`` are evaluation.
        nbytes: as Flower serialises the message's records, the same on every engine.
        form: what the receiver sees: plain, masked or encrypted.
        counted: part of the method (hello and evaluation are listed and not counted).
    """

    round: int
    sender: str
    receiver: str
    handler: str
    nbytes: int
    form: str
    counted: bool

    def line(self) -> str:
        """One JSON line."""
        return json.dumps(
            {
                "round": self.round,
                "from": self.sender,
                "to": self.receiver,
                "handler": self.handler,
                "bytes": self.nbytes,
                "form": self.form,
                "counted": self.counted,
            }
        )


@dataclass
class Transcript:
    """Crossings since the last commit, and running totals since the start.

    Only totals and the current round stay in memory; a run appends each round's lines to ``messages.jsonl``.
    """

    pending: list[Crossing] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, crossing: Crossing) -> None:
        """Note one crossing."""
        self.pending.append(crossing)
        if crossing.counted:
            if crossing.receiver == "server":
                self.bytes_up += crossing.nbytes
            else:
                self.bytes_down += crossing.nbytes

    def drain(self) -> list[Crossing]:
        """The crossings since the last call."""
        pending, self.pending = self.pending, []
        return pending
