"""The nodes as the SuperLink reports them, and notices about missing ones."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_AGAIN = 60.0  # seconds until a notice is repeated; this time doubles with each notice


@dataclass(frozen=True)
class NodeStatus:
    """A registered node.

    Attributes:
        id: Flower's id.
        name: the registered name; "" if there is none.
        public_key: PEM.
        online: whether the SuperLink has heard from the node recently.
        seen: when the node went offline, to within a minute; None if it never connected.
    """

    id: int
    name: str
    public_key: bytes
    online: bool
    seen: datetime.datetime | None


def waiting(nodes: Sequence[NodeStatus], now: datetime.datetime) -> str:
    """A text that names the missing silos; "" if all are connected.

    Example:
        >>> now = datetime.datetime(2026, 1, 1, 12, 4, tzinfo=datetime.UTC)
        >>> there = NodeStatus(1, "hospital-a", b"", True, now)
        >>> gone = NodeStatus(2, "hospital-b", b"", False, now - datetime.timedelta(minutes=4))
        >>> waiting([there, gone], now)
        'waiting for 1 of 2 silos: hospital-b, last seen 4 minutes ago'
        >>> waiting([there], now)
        ''
    """
    missing = sorted((node for node in nodes if not node.online), key=lambda node: (node.name, node.id))
    if not missing:
        return ""
    names = [f"{node.name or f'node {node.id}'}, {_ago(node.seen, now)}" for node in missing]
    return f"waiting for {len(missing)} of {len(nodes)} silos: {'; '.join(names)}"


class Missing:
    """Reports missing silos: at once when the list changes, and otherwise every few minutes.

    Args:
        notice: called with a line for the operator.
    """

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._names: list[int] = []
        self._next, self._pause = 0.0, _AGAIN

    @property
    def any(self) -> bool:
        """Whether a silo was missing at the last check."""
        return bool(self._names)

    def tell(self, nodes: Sequence[NodeStatus], left_out: bool = False) -> bool:
        """Report missing silos; returns whether there are any.

        Args:
            left_out: whether the round no longer waits for the missing silos and goes on without them.
        """
        missing, now = sorted(node.id for node in nodes if not node.online), time.monotonic()
        if missing != self._names:
            if self._names and not missing and not left_out:
                self._notice("all awaited silos are connected")
            self._names, self._next, self._pause = missing, now, _AGAIN
        if missing and now >= self._next:
            self._notice(waiting(nodes, datetime.datetime.now(datetime.UTC)))
            self._next, self._pause = now + self._pause, min(self._pause * 2, 3600.0)
        return bool(missing)


def _ago(seen: datetime.datetime | None, now: datetime.datetime) -> str:
    if seen is None:
        return "never seen"
    seconds = max((now - seen).total_seconds(), 0.0)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"last seen {count} {unit}{'s' * (count > 1)} ago"
    return "last seen less than a minute ago"


def moment(seconds: float) -> datetime.datetime | None:
    """The time at this number of seconds since 1970; None for 0."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC) if seconds else None
