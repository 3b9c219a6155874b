"""Memory for large vectors: in huge pages, and used again.

A fresh buffer of 400 MB in pages of 4 KiB takes ten times as long to touch as to copy. NumPy asks the kernel for huge
pages, which leaves the clearing of fresh memory, about one copy; a buffer that nobody can see any more serves again
instead. Nobody can: a tensor, its views and what NumPy made of them all keep the lease alive, and only its end gives
the memory back.
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

LARGE = 4 << 20  # bytes; what is smaller comes from torch's allocator
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_IDLE = 512 << 20  # bytes that a process may keep between two steps
KEPT = 4  # buffers that wait for use at most: a round has about as many of one size in turn

_free: deque[Any] = deque(maxlen=KEPT)  # its operations are atomic: a lease may end in any thread
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free.clear)  # writing to the parent's pages would copy them


class _Lease:
    """Owns a buffer as long as any array on it lives."""

    def __init__(self, memory: np.ndarray, free: deque[Any], token: Any) -> None:
        self._memory, self._free, self._token = memory, free, token
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._token)


def lent(memory: np.ndarray, free: deque[Any], token: Any) -> np.ndarray:
    """The same memory; when nobody can see this array or anything on it any more, ``free`` gets the token."""
    return np.asarray(_Lease(memory, free, token))


def empty(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised vector (count,) on the CPU; a large one begins at a cache line, in huge pages where there are
    any.
    """
    nbytes = count * dtype.itemsize
    if nbytes < LARGE:
        return torch.empty(count, dtype=dtype)
    memory = _take(nbytes)
    return torch.from_numpy(lent(memory, _free, memory)).view(dtype)


@functools.cache
def keep_freed() -> None:
    """From now on this process keeps what it frees for its next allocations, up to ``_IDLE`` bytes.

    By default glibc gives 100 MiB of a training step back to the kernel, which clears and maps them anew, page by page,
    at every step: a tenth to a fifth of the step's time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc would come to by itself
        mallopt(_M_TRIM_THRESHOLD, _IDLE)


def like(x: Tensor) -> Tensor | None:
    """Where an operation on the vector ``x`` shall put its result: None, its own choice, where that is small."""
    return empty(len(x), x.dtype) if x.numel() * x.element_size() >= LARGE else None


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
