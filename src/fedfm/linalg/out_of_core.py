"""Vectors that exceed memory, in memory-mapped anonymous files; each is an ordinary tensor.

Loops over many vectors read and write the files directly (:class:`Stored`): the first access to a mapped page takes
several times as long as its copy, and the system would keep pages that are not read again.
"""

from __future__ import annotations

import errno
import operator
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.linalg import pages
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Layout, Params

ALIGNED = 64  # bytes: a vector begins at a cache line
PAGE = 4096  # bytes: a long vector in a file begins at a page; otherwise a write next to it reads first
FILE, MANY = 1 << 28, 1000  # most bytes and vectors of a shelf in one file
UNCACHED = 0x80 if sys.platform == "linux" else 0  # RWF_DONTCACHE of Linux 6.14: free pages after the copy
DIRECT = getattr(os, "O_DIRECT", 0)  # bypasses the page cache
SECTOR = 512  # bytes: alignment of memory for O_DIRECT

_mapped: dict[int, tuple[int, Stored]] = {}  # address -> bytes, and the mapped file


def limit() -> int:
    """Bytes of memory for vectors of one kind, e.g. a round's replies: ``FEDFM_MEMORY``, else a quarter of all memory.

    Raises:
        InputError: ``FEDFM_MEMORY`` is not a number of bytes.
    """
    given = os.environ.get("FEDFM_MEMORY")
    if given is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if not given.isdecimal():
        raise InputError(f'FEDFM_MEMORY = "{given}": expected a number of bytes, e.g. 4000000000')
    return int(given)


def allocate(count: int, layout: Layout, most: int | None = None) -> list[Params]:
    """Uninitialised vectors, to be written once before they are read.

    They share one buffer, which is free again when none of them is referenced. The next round reuses it, because new
    memory takes more time than the weighted sums. More than ``most`` bytes are in a mapped anonymous file in the folder
    of temporary files (``TMPDIR``, which should be on a disk). Its space is allocated at once: a full disk is an error
    here and no crash later.

    Args:
        count: number of vectors.
        layout: of each.
        most: bytes of all vectors that may be in memory; None: :func:`limit`.

    Raises:
        OSError: the disk is full.
    """
    fits = count * layout.nbytes <= (limit() if most is None else most)
    sizes = {d: size * d.itemsize for d, size in layout.sizes.items()}
    align = {d: ALIGNED if fits or n < 16 * PAGE else PAGE for d, n in sizes.items()}
    steps = {d: -(-n // align[d]) * align[d] for d, n in sizes.items()}
    nbytes = count * sum(steps.values())
    memory = buffers.empty(nbytes, torch.uint8) if fits else _in_file(nbytes)
    made, at = [], 0
    for _ in range(count):
        flats = {}
        for dtype, size in layout.sizes.items():
            flats[dtype] = memory[at : at + size * dtype.itemsize].view(dtype)
            at += steps[dtype]
        made.append(Params.from_flat(layout, flats))
    return made


def to_file(x: Params) -> Params:
    """Move a vector as large as a complete model to an anonymous file, if the disk has room."""
    if x.nbytes < pages.LARGE or len(x.flats) > 1:
        return x
    ((dtype, flat),) = x.flats.items()
    try:
        memory = _in_file(x.nbytes, passed=True).view(dtype)
    except OSError:
        return x
    memory.copy_(flat)
    pages.release(memory)
    return Params.from_flat(x.layout, {dtype: memory})


def _in_file(nbytes: int, passed: bool = False) -> Tensor:
    """Bytes (nbytes,) in an anonymous file; ``passed``: passes over them release their pages."""
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
    """A mapped file for :func:`remember`; its own descriptors leave the mapping's read-ahead unchanged.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):  # read-ahead in each of a thousand files would exceed memory
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, UNCACHED)
    except (OSError, AttributeError):  # use the page cache: a cached page takes half the time
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
        descriptor: of the file.
        at: the vector's first byte.
        flags: of each call.
        direct: a second descriptor for complete pages and sector-aligned memory, which takes a third of the time.
    """

    descriptor: int
    at: int
    flags: int
    direct: int | None

    def read(self, start: int, into: np.ndarray) -> None:
        """Read into (n,) contiguous from byte ``start`` of the vector on.

        Raises:
            OSError: the file is shorter, or the disk fails.
        """
        self._all(os.preadv, start, into)

    def write(self, start: int, new: np.ndarray) -> None:
        """Write (n,) contiguous from byte ``start`` of the vector on; the mapped vector changes too.

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
                direct = None  # after a partial transfer, or if the disk needs a larger alignment
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


class Shelf:
    """Keeps vectors that arrive one by one: in memory while they fit, then in files.

    Args:
        most: bytes in memory; None: :func:`limit`.
    """

    def __init__(self, most: int | None = None) -> None:
        self._left = limit() if most is None else most
        self._free: dict[Layout, list[Params]] = {}

    def put(self, x: Params) -> Params:
        """Store a vector and return it; a vector in a file stays there.

        Raises:
            OSError: the disk is full.
        """
        if all(location_of(flat) for flat in x.flats.values()):
            return x
        self._left -= x.nbytes
        if self._left >= 0 or not x.nbytes:
            return x
        free = self._free.setdefault(x.layout, [])
        if not free:
            free += allocate(max(min(FILE // x.nbytes, MANY), 1), x.layout, most=0)
        kept = free.pop()
        for dtype, flat in x.flats.items():
            if (file := location_of(kept.flats[dtype])) is None:  # no entries
                kept.flats[dtype].copy_(flat)
            else:
                file.write(0, flat.view(torch.uint8).numpy())
        return kept


def keep_all(vectors: Iterable[Params], most: int | None = None) -> list[Params]:
    """Put the vectors on one :class:`Shelf`; of a generator at most one new vector is in memory."""
    shelf = Shelf(most)
    return [shelf.put(x) for x in vectors]


class Vectors(dict[str, Params]):
    """A vector for each client. Sums and differences contain the clients of both sides, in the order of the right one;
    their vectors are computed one by one and kept by :func:`keep_all`.

    Example:
        >>> theta_bar = Vectors(a=Params({"w": torch.tensor([1.0])}), b=Params({"w": torch.tensor([2.0])}))
        >>> {i: w["w"].tolist() for i, w in (theta_bar + {"b": theta_bar["a"]}).items()}
        {'b': [3.0]}
    """

    def __add__(self, other: Mapping[str, Params]) -> Vectors:
        return self._with(other, operator.add)

    def __sub__(self, other: Mapping[str, Params]) -> Vectors:
        return self._with(other, operator.sub)

    def less(self, w: Params) -> Vectors:
        """Each vector minus w."""
        return self - dict.fromkeys(self, w)

    def cast(self, other: Mapping[str, Params]) -> Vectors:
        """The vectors in the dtypes of the other's."""
        return self._with({i: other[i] for i in self}, lambda x, y: x.cast(y.layout))

    def _with(self, other: Mapping[str, Params], operation: Callable[[Params, Params], Params]) -> Vectors:
        both = [i for i in other if i in self]
        return Vectors(zip(both, keep_all(operation(self[i], other[i]) for i in both), strict=True))
