"""Compilation of loops with numba. Only modules with loops import numba; callers import them just before a loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba.core.codegen import get_host_cpu_features

SLACK = np.float32(1 - 1e-4)  # factor on bounds of distances; the margin is far above float32 rounding
SPAN = 256  # number of rows that are summed in float32 before their sum is added to a float64 sum
EXACT = {"reassoc", "contract", "nsz", "arcp"}  # LLVM's flags for sums in vector lanes; NaN and infinity are kept
MATHS = EXACT | {"nnan"}  # also allows minima in vector lanes; the values must not be NaN
LOWER_CLOCK = {"skylake-avx512", "cascadelake", "cooperlake"}  # processors that lower their clock for 512-bit registers
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}


def _whole_registers() -> bool:
    """Let numba compile for the widest vectors of this processor; returns whether numba then prefers 512 bits.

    On Intel's processors LLVM prefers 256-bit vectors, because the first processors with 512 bits lowered their clock.
    On later processors 256 bits make these loops 1.1 to 1.4 times as slow. The variables NUMBA_CPU_NAME and
    NUMBA_CPU_FEATURES have precedence. Loops that this process has already compiled do not change.
    """
    if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None:
        features = get_host_cpu_features()
        if "+avx512f" in features and binding.get_host_cpu_name() not in LOWER_CLOCK:
            numba.config.CPU_FEATURES = f"{features},-prefer-256-bit"
            return True
    return False


WHOLE_REGISTERS = _whole_registers()


def compile_cached(function: Callable[..., Any], maths: set[str] = MATHS, signature: Any = None) -> Any:
    """Compile a function at its first call, or now if a signature is given.

    The compiled code is cached on disk, or in memory if no folder is writable. With a signature, code that is already
    on disk is only loaded.
    """
    given: Sequence[Any] = () if signature is None else (signature,)
    try:
        return numba.njit(*given, cache=True, fastmath=maths, **OPTIONS)(function)
    except RuntimeError:  # no locator available
        return numba.njit(*given, fastmath=maths, **OPTIONS)(function)


def part(function: Callable[..., Any], maths: set[str] = MATHS) -> Any:
    """Compile a function that is inlined into compiled functions, since a call would count references to arrays."""
    return numba.njit(forceinline=True, fastmath=maths, **OPTIONS)(function)


def compile_part(function: Callable[..., Any]) -> Any:
    """Compile a function once, for compiled functions that call it."""
    return numba.njit(fastmath=EXACT, no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)


def aligned_empty(*shape: int, dtype: Any = np.float32) -> Any:
    """An uninitialised array that begins at a cache line, and so does each row if it takes a multiple of 64 bytes."""
    entries, size = math.prod(shape), np.dtype(dtype).itemsize
    block = np.empty(entries + 64 // size, dtype)
    at = -block.ctypes.data % 64 // size
    return block[at : at + entries].reshape(shape)
