"""How loops are compiled. Only this module and ``passes`` import numba, and only what computes imports them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

SLACK = np.float32(1 - 1e-4)  # of bounds of distances: far above what float32 rounds off
SPAN = 256  # rows whose sums run in float32 before they move into float64
MATHS = {"reassoc", "contract", "nsz", "arcp", "nnan"}  # sums and minima in vector lanes; infinity keeps its meaning
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def compiled(function: Callable[..., Any], maths: set[str] = MATHS) -> Any:
    """Compile at the first call, keep on disk; in memory only where there is no folder to keep it in."""
    try:
        return numba.njit(cache=True, fastmath=maths, **OPTIONS)(function)
    except RuntimeError:  # no locator available
        return numba.njit(fastmath=maths, **OPTIONS)(function)


def in_order(function: Callable[..., Any]) -> Any:
    """Compiled; its sums are made in the order in which they are written, and NaN compares as it should."""
    return compiled(function, {"contract"})


def part(function: Callable[..., Any]) -> Any:
    """Part of a compiled function, always inlined: a call would count the references to every array it is given."""
    return numba.njit(forceinline=True, fastmath=MATHS, **OPTIONS)(function)


def aligned(*shape: int) -> Any:
    """Float32, not filled, from a cache line on; so are the rows of a multiple of 16 features."""
    entries = math.prod(shape)
    block = np.empty(entries + 16, np.float32)
    at = -block.ctypes.data % 64 // 4
    return block[at : at + entries].reshape(shape)
