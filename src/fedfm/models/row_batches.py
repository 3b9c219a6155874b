"""Rows in the batches in which a model reads them, and back: of a fixed size, or sorted by length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows

FIXED = 32  # rows in one batch of the frozen backbone


def fixed_batches(rows: Rows) -> Iterator[tuple[Batch, int]]:
    """(batch of FIXED rows, number of valid ones); copies of the last row fill the last batch."""
    starts = range(0, len(rows), FIXED)
    orders = [np.minimum(np.arange(start, start + FIXED), len(rows) - 1) for start in starts]
    return zip(rows.each(orders), (min(FIXED, len(rows) - start) for start in starts), strict=True)


def by_length(rows: Rows) -> tuple[Rows, Tensor]:
    """(rows sorted by length, so that batches have little padding; the inverse permutation)."""
    if rows.tokens is None:
        return rows, torch.arange(len(rows))
    order = torch.argsort(torch.from_numpy(rows.tokens.length), stable=True)
    return rows.take(order), torch.argsort(order)
