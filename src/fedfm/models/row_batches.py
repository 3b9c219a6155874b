"""Splits rows into batches for a model, of a fixed size or sorted by length, and restores their order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows

FIXED = 32  # number of rows in one batch of the frozen backbone
LARGE = 100_000_000  # with this number of parameters or more, it takes too long to fill a batch with copies of a row


def fixed_batches(rows: Rows, *, large: bool = False) -> Iterator[tuple[Batch, int]]:
    """Yield (batch of FIXED rows, number of valid rows in it); copies of the last row fill the last batch.

    All batches have one size, so a row's outputs do not depend on the other rows, not even in the last bits. For a
    ``large`` model the last batch is only filled to the next multiple of 8.
    """
    starts = range(0, len(rows), FIXED)
    valid = [min(FIXED, len(rows) - start) for start in starts]
    sizes = [-(-n // 8) * 8 if large else FIXED for n in valid]
    orders = [np.minimum(np.arange(at, at + size), len(rows) - 1) for at, size in zip(starts, sizes, strict=True)]
    return zip(rows.each(orders), valid, strict=True)


def by_length(rows: Rows) -> tuple[Rows, Tensor]:
    """The rows sorted by length, so that batches have little padding, and the permutation that restores the order."""
    if rows.tokens is None:
        return rows, torch.arange(len(rows))
    order = torch.argsort(torch.from_numpy(rows.tokens.length), stable=True)
    return rows.take(order), torch.argsort(order)
