"""Distances of released means to rows, to find means that equal one row."""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

SHARE = 0.05  # a point is a copy of a row if it is nearer than this share of the typical distance between neighbours
NAMED = 1000  # largest number of copies in the detail of a finding


def nearest(points: Array, rows: Array) -> tuple[Array, Array]:
    """For each point (k, d) the nearest row (n, d): (indices (k,), Euclidean distances (k,)); infinite without rows."""
    if not len(rows):
        return np.zeros(len(points), dtype=np.int64), np.full(len(points), np.inf)
    squares = _squares(points, rows)
    index = squares.argmin(1)
    # The expanded form of |a - b|^2 loses digits of small distances, so compute the smallest again.
    exact = np.linalg.norm(points.astype(np.float64) - rows[index], axis=1)
    return index, exact


def typical_gap(rows: Array, most: int = 1000) -> float:
    """Median distance from a row (n, d) to the nearest row that differs from it; 0 if there is none.

    It uses at most ``most`` rows, evenly spread.
    """
    rows = rows[:: -(-len(rows) // most)] if len(rows) > most else rows
    rows = np.unique(rows.astype(np.float64), axis=0)
    if len(rows) < 2:
        return 0.0
    squares = _squares(rows, rows)
    squares[np.diag_indices_from(squares)] = np.inf
    index = squares.argmin(1)
    return float(np.median(np.linalg.norm(rows - rows[index], axis=1)))


def _squares(a: Array, b: Array) -> Array:
    """Squared distances (k, n)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    middle = b.mean(0)  # subtracted, since features far from the origin would lose digits
    a, b = a - middle, b - middle
    return np.maximum((a * a).sum(1)[:, None] - 2 * a @ b.T + (b * b).sum(1), 0.0)  # type: ignore[no-any-return]
