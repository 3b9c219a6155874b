"""How loops are compiled. Only modules of loops import numba, and they are imported where a loop is about to run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.core.codegen import get_host_cpu_features

SLACK = np.float32(1 - 1e-4)  # of bounds of distances: far above what float32 rounds off
SPAN = 256  # rows whose sums run in float32 before they move into float64
EXACT = {"reassoc", "contract", "nsz", "arcp"}  # sums in vector lanes; NaN and infinity keep their meaning
MATHS = EXACT | {"nnan"}  # minima in vector lanes too, where no NaN can come
LOWER_CLOCK = {"skylake-avx512", "cascadelake", "cooperlake"}  # while 512-bit registers are at work
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def _whole_registers() -> bool:
    """Compile for the widest vectors there are; whether these are of 512 bits.

    On Intel's processors LLVM prefers half of a 512-bit register, since the first ones that had it lowered their clock;
    on later ones these loops then take 1.1 to 1.4 times as long. What the environment says (NUMBA_CPU_NAME,
    NUMBA_CPU_FEATURES) stays, and so does what this process has compiled before.
    """
    if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        features = get_host_cpu_features()
        if "+avx512f" in features and binding.get_host_cpu_name() not in LOWER_CLOCK:
            numba.config.CPU_FEATURES = f"{features},-prefer-256-bit"
            return True
    return False


WHOLE_REGISTERS = _whole_registers()


def compiled(function: Callable[..., Any], maths: set[str] = MATHS, signature: Any = None) -> Any:
    """Compile at the first call, or at once for one signature; keep on disk, or in memory where no folder is to be had.

    A signature costs nothing where the compiled code is on disk already.
    """
    given: Sequence[Any] = () if signature is None else (signature,)
    try:
        return numba.njit(*given, cache=True, fastmath=maths, **OPTIONS)(function)
    except RuntimeError:  # no locator available
        return numba.njit(*given, fastmath=maths, **OPTIONS)(function)


def in_order(function: Callable[..., Any]) -> Any:
    """Compiled; its sums are made in the order in which they are written, and NaN compares as it should."""
    return compiled(function, {"contract"})


def part(function: Callable[..., Any], maths: set[str] = MATHS) -> Any:
    """Part of a compiled function, always inlined: a call would count the references to every array it is given."""
    return numba.njit(forceinline=True, fastmath=maths, **OPTIONS)(function)


def called(function: Callable[..., Any], maths: set[str] = MATHS) -> Any:
    """Part of compiled functions that is worth a call: compiled once, not wherever it stands."""
    return numba.njit(fastmath=maths, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


def aligned(*shape: int, dtype: Any = np.float32) -> Any:
    """Not filled, from a cache line on; so are the rows of a multiple of 16 features."""
    entries, size = math.prod(shape), np.dtype(dtype).itemsize
    block = np.empty(entries + 64 // size, dtype)
    at = -block.ctypes.data % 64 // size
    return block[at : at + entries].reshape(shape)
