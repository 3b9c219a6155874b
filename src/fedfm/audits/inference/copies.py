"""Whether a released mean sits on one row: distances of means to rows, beside those to rows that were never used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def nearest(points: Array, rows: Array) -> tuple[Array, Array]:
    """Of each point the nearest row's index and its Euclidean distance; infinite where there are no rows.

    Args:
        points: (k, d).
        rows: (n, d).

    Returns:
        (k,) indices, (k,) distances.
    """
    if not len(rows):
        return np.zeros(len(points), dtype=np.int64), np.full(len(points), np.inf)
    squares = _squares(points, rows)
    index = squares.argmin(1)
    # The expansion of |a - b|^2 loses the digits of small distances, which are those that matter here.
    exact = np.linalg.norm(points.astype(np.float64) - rows[index], axis=1)
    return index, exact


def typical_gap(rows: Array, most: int = 1000) -> float:
    """The median distance of a row to its nearest other one that is not equal to it; 0 where there is none.

    Args:
        rows: (n, d).
        most: rows looked at, evenly spread, where there are more.
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
    middle = b.mean(0)  # features far from the origin would lose digits
    a, b = a - middle, b - middle
    return np.maximum((a * a).sum(1)[:, None] - 2 * a @ b.T + (b * b).sum(1), 0.0)  # type: ignore[no-any-return]
