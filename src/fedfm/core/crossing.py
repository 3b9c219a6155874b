"""One message between parties, as a line of ``messages.jsonl``."""

from __future__ import annotations

import json
from typing import NamedTuple


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
