"""Memory-mapped files of vectors, and the file and offset of each vector.

Loops over many vectors do not use the mapping; they read and write the files directly (:class:`Stored`). The first
access to a mapped page takes several times as long as a copy of the page, and the system would keep pages that are not
read again.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfm.linalg import pages

PAGE = 4096  # bytes; a long vector begins at a page, because a write to a part of a page first reads the page
UNCACHED = 0x80 if sys.platform == "linux" else 0  # RWF_DONTCACHE of Linux 6.14 frees the pages after the copy
DIRECT = getattr(os, "O_DIRECT", 0)  # bypasses the page cache
SECTOR = 512  # bytes: alignment of memory for O_DIRECT

_mapped: dict[int, tuple[int, Stored]] = {}  # address -> number of bytes, and the mapped file


def bytes_in_file(nbytes: int, passed: bool = False) -> Tensor:
    """Bytes (nbytes,) in an anonymous file. If ``passed``, :mod:`fedfm.linalg.pages` may release the file's pages."""
    handle, name = tempfile.mkstemp()
    with os.fdopen(handle, "r+b") as file:
        try:
            opened = open_again(name, os.O_RDWR)
        finally:
            os.unlink(name)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:
                os.ftruncate(handle, nbytes)
            memory = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
        except BaseException:
            opened.close()
            raise
    remember(memory, opened)
    if passed:
        pages.register(memory)
    return torch.from_numpy(memory)


def open_again(path: str | Path, mode: int) -> Stored:
    """Open a mapped file once more, for :func:`remember`. The new descriptors do not change the mapping's read-ahead.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):  # read-ahead in each of a thousand files would exceed memory
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, UNCACHED)
    except (OSError, AttributeError):  # no uncached reads: a read from the page cache takes half the time of O_DIRECT
        return Stored(descriptor, 0, 0, None)
    try:
        return Stored(descriptor, 0, UNCACHED, os.open(path, mode | os.O_CLOEXEC | DIRECT) if DIRECT else None)
    except OSError:
        return Stored(descriptor, 0, UNCACHED, None)


def remember(memory: np.ndarray, opened: Stored) -> None:
    """Register the file that is mapped in ``memory``; it is closed when the memory is no longer referenced."""
    if not hasattr(os, "preadv"):  # fall back to the mapping
        opened.close()
        return
    address = memory.ctypes.data
    _mapped[address] = memory.nbytes, opened
    closing = weakref.finalize(memory, lambda: _mapped.pop(address)[1].close())
    closing.atexit = False  # the memory may still be in use at exit


class Stored(NamedTuple):
    """The place of a flat vector in a file, valid while the vector lives.

    Attributes:
        descriptor: the descriptor of the file.
        at: the offset of the vector's first byte in the file.
        flags: the flags of each read and write.
        direct: a second descriptor, which bypasses the page cache; a transfer then takes a third of the time. It needs
            complete pages and sector-aligned memory. None if the file has no such descriptor.
    """

    descriptor: int
    at: int
    flags: int
    direct: int | None

    def read(self, start: int, into: np.ndarray) -> None:
        """Fill the contiguous array ``into`` (n,) from byte ``start`` of the vector on.

        Raises:
            OSError: the file is too short, or the disk fails.
        """
        self._all(os.preadv, start, into)

    def write(self, start: int, new: np.ndarray) -> None:
        """Write the contiguous array ``new`` (n,) from byte ``start`` of the vector on; the mapped vector changes too.

        Raises:
            OSError: the disk is full, or fails.
        """
        self._all(os.pwritev, start, new)

    def _all(self, call: Callable[..., int], start: int, data: np.ndarray) -> None:
        left, start, direct = data.data.cast("B"), self.at + start, self.direct
        if start % PAGE or len(left) % PAGE or data.__array_interface__["data"][0] % SECTOR:
            direct = None
        while left:
            try:
                descriptor, flags = (self.descriptor, self.flags) if direct is None else (direct, 0)
                done = call(descriptor, [left], start, flags)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                direct = None  # EINVAL follows a partial transfer, or the disk needs a larger alignment
                continue
            if not done:
                raise OSError(errno.EIO, "the file of a vector is shorter than the vector")
            left, start = left[done:], start + done

    def close(self) -> None:
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)


def location_of(flat: Tensor) -> Stored | None:
    """The place of these entries in a file that this module has mapped, else None."""
    place = flat.data_ptr()
    for begin, (nbytes, file) in list(_mapped.items()):
        if begin <= place < begin + nbytes:
            return file._replace(at=place - begin)
    return None
