"""What the compiled loops over a mixture's rows share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedfm.compiled import compiled, in_order, part

__all__ = ["SLACK", "SPAN", "aligned", "compiled", "in_order", "part"]

SLACK = np.float32(1 - 1e-4)  # of bounds of distances: far above what float32 rounds off
SPAN = 256  # rows whose sums run in float32 before they move into float64


def aligned(*shape: int) -> Any:
    """Float32, not filled, from a cache line on; so are the rows of a multiple of 16 features."""
    entries = math.prod(shape)
    block = np.empty(entries + 16, np.float32)
    at = -block.ctypes.data % 64 // 4
    return block[at : at + entries].reshape(shape)
