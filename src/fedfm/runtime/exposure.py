"""The bytes that each party received in each form (plain, masked, encrypted), summed from ``messages.jsonl``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedfm.runtime import logs

SERVER = "server"
MEAN = "train."  # prefix of the names of handlers whose replies the server only averages
_OF_ROWS = ("train", "query", "reveal")  # kinds of messages whose replies are computed from a client's rows
_MOST = 2**63  # largest valid count of bytes; no run writes a larger one


@dataclass(frozen=True)
class Traffic:
    """All messages of one handler in one direction and form."""

    handler: str
    direction: str  # up, down or across
    form: str  # plain, masked or encrypted
    counted: bool
    messages: int
    bytes: int
    clients: int


@dataclass(frozen=True)
class Exposure:
    """The messages that each party received.

    Attributes:
        traffic: one entry for each handler, direction and form, the largest first.
        received: bytes for each party and form.
        smallest_sum: the smallest number of updates in a sum that the server saw. It is 1 if the server saw a single
            client's reply. It is None if the server saw no reply computed from rows, or if the log does not assign
            replies to calls.
    """

    traffic: tuple[Traffic, ...]
    received: Mapping[str, Mapping[str, int]]
    smallest_sum: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest's entries, summed over all clients; only ``messages.jsonl`` has values by client."""
        by = {"up": ("clients", SERVER), "down": (SERVER, "clients"), "across": ("clients", "clients")}
        rows = []
        for t in self.traffic:
            sender, receiver = by[t.direction]
            row = asdict(t)
            del row["direction"]
            rows.append({"by": receiver, "from": sender, **row})
        return {"smallest_sum": self.smallest_sum, "received": rows}


def exposure_of(path: Path, excluded: Collection[tuple[int, str]] = ()) -> Exposure:
    """Read a run's ``messages.jsonl``; damaged lines are skipped.

    Args:
        excluded: (round, client) of each exclusion; the client's update may be missing from the round's sums.
    """
    sums: dict[tuple[str, str, str, bool], list[Any]] = {}
    received: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    hidden: dict[tuple[int, int], int] = defaultdict(int)
    alone, unknown = False, False
    for line in logs.messages(path):
        sender, receiver, handler = (str(line.get(key, "")) for key in ("from", "to", "handler"))
        form, counted, size = str(line.get("form", "plain")), line.get("counted") is not False, line.get("bytes")
        size = size if type(size) is int and 0 <= size < _MOST else 0
        direction = "up" if receiver == SERVER else "down" if sender == SERVER else "across"
        total = sums.setdefault((handler, direction, form, counted), [0, 0, set()])
        total[0] += 1
        total[1] += size
        total[2].add(receiver if direction == "down" else sender)
        received[receiver][form] += size
        kind = handler.partition(".")[0]
        if direction == "up" and kind in _OF_ROWS and (counted or kind == "reveal"):
            call = line.get("call")
            alone |= form == "plain"
            unknown |= form == "masked" and type(call) is not int
            if form == "masked" and type(call) is int and (line["round"], sender) not in excluded:
                hidden[line["round"], call] += 1
    rows = (Traffic(*key, n, total, len(clients)) for key, (n, total, clients) in sums.items())
    traffic = tuple(sorted(rows, key=lambda r: (not r.counted, -r.bytes, r.handler, r.direction)))
    smallest = 1 if alone else None if unknown else min(hidden.values(), default=None)
    return Exposure(traffic, received, smallest)
