"""Processes many rows in parts that fit into memory: by a budget of tokens, and by halving after an error."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")
_alone = True  # whether no other process takes part in this process's passes
TOKENS = 1 << 15  # number of tokens of a batch without gradients, e.g. 64 rows of 512 tokens


def warn(text: str) -> None:
    """Issue the text as a warning."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def raise_when_full() -> None:
    """Let :func:`in_halves` raise its errors from now on, in a process that computes together with others."""
    global _alone
    _alone = False


def by_tokens(longest: int, most: int, each: int = 1, budget: int = TOKENS) -> int:
    """The number of rows of a batch: a power of two from 1 to ``most``, or ``most`` itself.

    Args:
        longest: tokens of the longest row.
        each: units of the budget per token.

    Example:
        >>> by_tokens(128, 64), by_tokens(2048, 64), by_tokens(100_000, 64)
        (64, 16, 1)
    """
    fit = max(budget // max(longest * each, 1), 1)
    return min(most, 1 << (fit.bit_length() - 1))


def in_halves(most: int, work: Callable[[int], T], say: Callable[[str], None]) -> tuple[T, int]:
    """(``work(size)``, size) for the largest of the sizes most, most / 2, ... 1 that fits into the device's memory.

    Args:
        work: starts again at every call.
        say: is called with one line for each halving.

    Raises:
        torch.OutOfMemoryError: not even one row fits into memory.

    Example:
        >>> in_halves(8, lambda size: size * 2, print)
        (16, 8)
    """
    while True:
        try:
            return work(most), most
        except torch.OutOfMemoryError:
            if most <= 1 or not _alone:
                raise
        # This is outside the handler, because the error's traceback keeps the tensors of the failed call alive.
        most //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"out of memory: from here on {most} row{'s' * (most > 1)} at once")
