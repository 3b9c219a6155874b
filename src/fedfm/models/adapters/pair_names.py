"""Names of the parts of a vector of two adapters: the shared adapter, the client's own adapter, and their weights."""

from __future__ import annotations

from collections.abc import Iterable

GLOBAL, LOCAL, MIX, GATE = "global", "local", "mix", "gate"  # parts of a vector of two adapters


def is_pair(w: Iterable[str]) -> bool:
    """Whether w is a pair of adapters, from :func:`fedfm.models.adapters.experts.pair`."""
    return f"{MIX}/bias" in w


def weighed_by(w: Iterable[str]) -> str | None:
    """The part that weighs two adapters: ``mix`` for a pair, ``gate`` for experts; None for a single adapter."""
    parts = {name.partition("/")[0] for name in w}
    return next((part for part in (MIX, GATE) if {GLOBAL, LOCAL, part} <= parts), None)


def by_row(w: Iterable[str]) -> bool:
    """Whether the weights of the two adapters differ from row to row."""
    return f"{MIX}/slope" in w
