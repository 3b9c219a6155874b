"""Distances from released means to rows, to find means that equal a single row."""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

SHARE = 0.05  # a point is a copy of a row if it is nearer than this fraction of the typical distance of neighbours
MOST = 1000  # largest number of rows from which the typical distance is computed
NAMED = 1000  # largest number of copies that the detail of a finding lists


def nearest(points: Array, rows: Array) -> tuple[Array, Array]:
    """For each point (k, d), the index (k,) of the nearest of the rows (n, d), and their Euclidean distance (k,).

    Without rows, the distances are infinite.
    """
    if not len(rows):
        return np.zeros(len(points), dtype=np.int64), np.full(len(points), np.inf)
    squares = _squares(points, rows)
    index = squares.argmin(1)
    # The expanded form of |a - b|^2 loses digits if distances are small, so the smallest one is computed again.
    exact = np.linalg.norm(points.astype(np.float64) - rows[index], axis=1)
    return index, exact


def typical_gap(rows: Array) -> float:
    """Median distance from a row (n, d) to the nearest row that differs from it; 0 if no row differs.

    It uses at most :data:`MOST` rows, evenly spread.
    """
    rows = rows[:: -(-len(rows) // MOST)] if len(rows) > MOST else rows
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
    middle = b.mean(0)  # subtract the mean, since features far from the origin would lose digits
    a, b = a - middle, b - middle
    return np.maximum((a * a).sum(1)[:, None] - 2 * a @ b.T + (b * b).sum(1), 0.0)  # type: ignore[no-any-return]
