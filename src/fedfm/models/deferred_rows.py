"""Decide whether rows that a task has deferred are computed at once or batch by batch."""

from __future__ import annotations

import math

import numpy as np

from fedfm.core.rows import Rows
from fedfm.models.images import room


def settle(rows: Rows, most: float | None) -> Rows:
    """Compute the rows if they take at most ``most`` bytes; otherwise return them unchanged.

    Args:
        most: largest number of bytes; None stands for the limit of :mod:`fedfm.models.images`.
    """
    if len(rows) < 2 or most == math.inf:
        return rows.compute()
    most = room() if most is None else most
    first = rows.take(np.array([0])).compute()
    fits = sum(first.tensors[name].nbytes for name in rows.deferred) * len(rows) <= most
    return rows.compute() if fits else rows
