"""Divide a number into integers in given proportions, and draw stratified rows."""

from __future__ import annotations

import numpy as np


def quota(counts: np.ndarray, total: int, rng: np.random.Generator, caps: np.ndarray | None = None) -> np.ndarray:
    """Split ``total`` in proportion to ``counts`` by largest remainder: int64 (G,) with the sum ``total``.

    The generator breaks ties between remainders, so that the order of the groups does not matter. With ``caps`` no
    group exceeds its cap, so the sum may be smaller than ``total``. If all counts are 0, all results are 0.
    """
    counts = np.asarray(counts, dtype=np.int64)
    whole = int(counts.sum())
    if whole == 0:
        return np.zeros_like(counts)
    if caps is None:
        caps = np.full_like(counts, total)
    total = min(total, int(caps.sum()))
    shares: np.ndarray = np.minimum(counts * total // whole, caps)
    order = np.lexsort(
        (rng.random(len(counts)), -(counts * total % whole))
    )  # computed with integers, so that rounding errors have no influence
    while (left := total - int(shares.sum())) > 0:
        open_ = order[shares[order] < caps[order]][:left]
        shares[open_] += 1
    return shares


def apportion(shares: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Split ``total`` by largest remainder in the proportions ``shares`` (G,), which sum to 1: int64 (G,).

    The generator breaks ties between remainders.
    """
    exact = shares * total
    parts: np.ndarray = np.floor(exact).astype(np.int64)
    order = np.lexsort((rng.random(len(shares)), parts - exact))
    parts[order[: total - parts.sum()]] += 1
    return parts


def hold_out(groups: np.ndarray | None, rows: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Choose round(fraction n) of ``rows`` (n,) to hold out, at least one; return them in ascending order.

    The rows' groups, ``groups`` (n,), keep their proportions. At least one row of each group stays for training.
    """
    if fraction <= 0 or len(rows) < 2:
        return rows[:0]
    groups = np.zeros(len(rows), dtype=np.int64) if groups is None else groups
    _, code, counts = np.unique(groups, return_inverse=True, return_counts=True)
    shares = quota(counts, max(1, round(fraction * len(rows))), rng, caps=counts - 1)
    return np.sort(rows[_draw(code, shares, rng)])


def thin(groups: np.ndarray | None, rows: np.ndarray, limit: int, rng: np.random.Generator) -> np.ndarray:
    """Choose at most ``limit`` of ``rows`` (n,); return them in ascending order.

    The rows' groups, ``groups`` (n,), keep their proportions. If possible, at least one row of each group is chosen.
    """
    if limit >= len(rows):
        return rows
    groups = np.zeros(len(rows), dtype=np.int64) if groups is None else groups
    _, code, counts = np.unique(groups, return_inverse=True, return_counts=True)
    shares = quota(counts, limit, rng)
    if limit >= len(counts):
        for empty in np.flatnonzero(shares == 0):
            shares[np.argmax(shares)] -= 1
            shares[empty] = 1
    return np.sort(rows[_draw(code, shares, rng)])


def _draw(code: np.ndarray, shares: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw ``shares[g]`` members of each group g; return their positions. ``code`` has each row's group."""
    order = rng.permutation(len(code))
    order = order[np.argsort(code[order], kind="stable")]  # by group, shuffled within each
    counts = np.bincount(code, minlength=len(shares))
    rank = np.arange(len(code)) - np.repeat(np.cumsum(counts) - counts, counts)
    drawn: np.ndarray = order[rank < shares[code[order]]]
    return drawn
