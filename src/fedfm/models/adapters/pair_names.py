"""Names of the parts of a vector of two adapters: the shared one, the client's own one, and what weighs them."""

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
    """Whether each row has its own share."""
    return f"{MIX}/slope" in w
