"""Releases the pages of large vectors in mapped files after a pass over the vectors.

The next pass reads the pages again: from the system's cache if they are still there, otherwise from the disk. Until
then the memory is free, e.g. for the gradients and moments of a model that was loaded from the vector.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable

import numpy as np
from torch import Tensor

from fedfm.linalg.kernels import buffers

LARGE = 64 << 20  # bytes; smaller vectors stay in memory
_PIECE = 1 << 22  # entries between two releases
_DONTNEED = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None

_ranges: dict[int, int] = {}  # address -> number of bytes of a mapped file


def register(memory: np.ndarray) -> None:
    """Register the bytes (n,) of a mapped file, so that :func:`release` may release their pages."""
    address = memory.ctypes.data
    _ranges[address] = memory.nbytes
    weakref.finalize(memory, _ranges.pop, address, None).atexit = False


def release(flat: Tensor) -> None:
    """Release the pages of this vector if it is in a mapped file, else do nothing."""
    if _DONTNEED is None or not is_mapped(flat):
        return
    begin = -(-flat.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (flat.data_ptr() + flat.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONTNEED)


def is_mapped(flat: Tensor) -> bool:
    """Whether these entries are in a mapped file."""
    place = flat.data_ptr()
    return any(begin <= place < begin + nbytes for begin, nbytes in list(_ranges.items()))


def apply_in_pieces(operation: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
    """Apply an elementwise operation to two vectors. If they are in files, few pages are in memory at a time."""
    out = buffers.like(a)
    if out is None or not (is_mapped(a) or is_mapped(b)):
        return operation(a, b, out=out)
    for at in range(0, len(a), _PIECE):
        piece = slice(at, at + _PIECE)
        operation(a[piece], b[piece], out=out[piece])
        release(a[piece])
        release(b[piece])
    return out
