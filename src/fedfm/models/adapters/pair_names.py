"""The parts of a vector of two adapters, by their names: a shared one, the client's own one, and what weighs them."""

from __future__ import annotations

from collections.abc import Iterable

GLOBAL, LOCAL, MIX, GATE = "global", "local", "mix", "gate"  # parts of a vector of two adapters


def is_pair(w: Iterable[str]) -> bool:
    """Whether w is from :func:`pair`."""
    return f"{MIX}/bias" in w


def weighed_by(w: Iterable[str]) -> str | None:
    """The part that says how two adapters are weighed: ``mix`` of a pair, ``gate`` of experts; None of one adapter."""
    parts = {name.partition("/")[0] for name in w}
    return next((part for part in (MIX, GATE) if {GLOBAL, LOCAL, part} <= parts), None)


def by_row(w: Iterable[str]) -> bool:
    """Whether each row has a share of its own."""
    return f"{MIX}/slope" in w
