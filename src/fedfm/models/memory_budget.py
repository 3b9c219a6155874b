"""Work on many rows in parts that fit the memory: by a budget of tokens, and after an error in halves."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
TOKENS = 1 << 15  # of a batch without gradients: 64 rows of 512


def warn(text: str) -> None:
    """Say it as a warning."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def by_tokens(longest: int, most: int, each: int = 1, budget: int = TOKENS) -> int:
    """Rows of a batch, a power of two from 1 to ``most``, or ``most`` itself.

    Args:
        longest: tokens of a row.
        each: units of the budget that a token takes.

    Example:
        >>> by_tokens(128, 64), by_tokens(2048, 64), by_tokens(100_000, 64)
        (64, 16, 1)
    """
    fit = max(budget // max(longest * each, 1), 1)
    return min(most, 1 << (fit.bit_length() - 1))


def in_halves(most: int, work: Callable[[int], T], say: Callable[[str], None]) -> tuple[T, int]:
    """``work(size)`` with the largest size of most, most / 2, ... 1 for which the device has memory; and that size.

    Args:
        work: starts afresh at every call.
        say: gets one line for each halving.

    Raises:
        torch.OutOfMemoryError: one row is too much.

    Example:
        >>> in_halves(8, lambda size: size * 2, print)
        (16, 8)
    """
    while True:
        try:
            return work(most), most
        except torch.OutOfMemoryError:
            if most <= 1:
                raise
        # Outside of the handler, whose traceback keeps the tensors of the failed call alive.
        most //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"out of memory: from here on {most} row{'s' * (most > 1)} at once")
