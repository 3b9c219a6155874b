"""Out of memory: the same work in smaller parts."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def warned(text: str) -> None:
    """Say it as a warning."""
    warnings.warn(text, RuntimeWarning, stacklevel=4)


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
