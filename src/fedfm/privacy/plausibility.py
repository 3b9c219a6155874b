"""Notices about a stated (epsilon, delta) that guarantees almost nothing."""

from __future__ import annotations

import math

MOST = 20.0  # largest plausible epsilon; beyond it, an attacker's odds may change by more than e^20, half a billion


def of_delta(delta: float, count: int, what: str) -> str | None:
    """A notice if delta is so large that a mechanism may publish the rows it protects and still satisfy the guarantee.

    A mechanism that publishes each of n rows with probability delta spends epsilon = 0 at this delta. It publishes
    n delta rows on average.

    Args:
        count: n, number of protected rows or clients.
        what: name of the rows or clients, e.g. ``"training rows"``.

    Example:
        >>> of_delta(1e-5, 1000, "training rows") is None
        True
    """
    if not count or delta * count < 1:
        return None
    better = 10.0 ** math.floor(math.log10(0.1 / count))
    return (
        f"privacy.delta = {delta:g} with {count} {what}: a mechanism that publishes each of them with this probability "
        f"satisfies any epsilon, so epsilon guarantees almost nothing; set privacy.delta well below 1 / {count}, e.g. "
        f"{better:g}"
    )


def of_epsilon(epsilon: float | None) -> str | None:
    """A notice if epsilon guarantees almost nothing.

    Args:
        epsilon: None if no epsilon is claimed.
    """
    if epsilon is None or epsilon <= MOST:
        return None
    return (
        f"epsilon = {epsilon:.4g} guarantees almost nothing: what the run discloses about a row may make an attacker "
        f"e^{epsilon:.3g} times as certain; use more noise, or fewer rounds or passes"
    )
