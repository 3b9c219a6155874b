"""Buffers for large vectors. They lie in huge pages and are reused.

With pages of 4 KiB, the first access to a new buffer of 400 MB takes ten times as long as a copy of the buffer. With
huge pages, which NumPy requests, the first access takes about as long as one copy, because the system still clears the
memory. A reused buffer is not cleared.

A lease owns a buffer that is in use. A tensor on the buffer, its views and NumPy's arrays of them keep the lease alive.
When the last of them is gone, the buffer is free for reuse.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGE = 4 << 20  # bytes; smaller buffers come from torch's allocator
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # constants of glibc's malloc.h
_IDLE = 512 << 20  # largest number of freed bytes that a process keeps between two steps
_NEVER = -1  # as a trim threshold: nothing goes back to the kernel
KEPT = 4  # largest number of free buffers that are kept; a round uses about this many buffers of one size

_free: deque[Any] = deque(maxlen=KEPT)  # its operations are atomic: a lease may end in any thread
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)  # a write in a child would copy the parent's pages


class _Lease:
    """Owns a buffer as long as an array on it exists."""

    def __init__(self, memory: np.ndarray, free: deque[Any], token: Any) -> None:
        self._memory, self._free, self._token = memory, free, token
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._token)


def lease(memory: np.ndarray, free: deque[Any], token: Any) -> np.ndarray:
    """An array on the same memory; ``free`` receives the token when the array and its views are no longer used."""
    return np.asarray(_Lease(memory, free, token))


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised vector (count,) on the CPU. A large one begins at a cache line, in huge pages if possible."""
    nbytes = count * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(count, dtype=dtype)
    memory = _take(nbytes)
    return torch.from_numpy(lease(memory, _free, memory)).view(dtype)


@functools.cache
def keep_freed() -> None:
    """Keep up to ``_IDLE`` freed bytes of this process for its next allocations.

    By default glibc returns the memory of a training step (e.g. 100 MiB) to the kernel. In the next step the kernel
    clears and maps it again, page by page, which takes a tenth to a fifth of the step's time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest value that glibc itself would reach
        mallopt(_M_TRIM_THRESHOLD, _IDLE)


@functools.cache
def keep_all_freed() -> bool:
    """Keep freed memory of arrays of any size for this process's next arrays; returns False without glibc.

    Even after :func:`keep_freed`, the memory of arrays above 32 MiB goes back to the kernel. A process that works on
    ciphertexts allocates hundreds of MB again and again, and a wide refresh some GB. With this function, a client
    refreshes its ciphertexts two to three times as fast. But until it ends, the process keeps all memory that it used
    at its peak. A threshold, of which mallopt takes at most 2 GiB, would be passed by every wide refresh.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False


def like(x: Tensor) -> Tensor | None:
    """A buffer for the result of an operation on the vector ``x``. None for a small ``x``: torch then allocates one."""
    return empty(len(x), x.dtype) if x.numel() * x.element_size() >= LARGE else None


def give_back() -> None:
    """Return the free buffers and glibc's free pages to the system, before another step needs much memory."""
    _free.clear()
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _take(nbytes: int) -> Any:
    for _ in range(len(_free)):
        try:
            memory = _free.popleft()
        except IndexError:  # another thread took it
            break
        if memory.nbytes == nbytes:
            return memory
        _free.append(memory)
    block = np.empty(nbytes + 64, np.uint8)
    at = -block.ctypes.data % 64
    return block[at : at + nbytes]
