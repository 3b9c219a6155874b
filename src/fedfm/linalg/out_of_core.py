"""Vectors that do not fit into memory together lie in files without a name, mapped: whoever uses one sees a tensor.

What goes through many of them reads and writes the files themselves (:class:`Stored`): the system makes a mapped page
at the first touch, which costs several times its copy, and keeps pages that nobody reads again.
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
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Layout, Params

ALIGNED = 64  # bytes: a vector begins at a cache line
PAGE = 4096  # bytes: a longer vector begins in a file at a page, or what is written next to it is read first
FILE, MANY = 1 << 28, 1000  # bytes, and vectors, of those that come one by one, in one file
UNCACHED = 0x80 if sys.platform == "linux" else 0  # RWF_DONTCACHE of Linux 6.14: give pages back once they are copied
DIRECT = getattr(os, "O_DIRECT", 0)  # between the disk and our memory, without pages between
SECTOR = 512  # bytes: where memory has to begin for that

_mapped: dict[int, tuple[int, Stored]] = {}  # address -> bytes, and the file that is mapped there


def limit() -> int:
    """Bytes that vectors of one kind (a round's replies, its results, the server's state) may take in memory together:
    ``FEDFM_MEMORY`` of the environment, else a quarter of the machine's.

    Raises:
        InputError: ``FEDFM_MEMORY`` is no number of bytes.
    """
    told = os.environ.get("FEDFM_MEMORY")
    if told is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if not told.isdecimal():
        raise InputError(f'FEDFM_MEMORY = "{told}": expected a number of bytes, e.g. 4000000000')
    return int(told)


def room(count: int, layout: Layout, most: int | None = None) -> list[Params]:
    """So many vectors whose entries are still to be written, each once and before anybody reads it.

    They share one piece of memory, which is free again when nobody sees any of them: the next round's have the same
    size and take it, and fresh memory costs more than the mixture. More than ``most`` bytes lie in a file without a
    name, mapped into memory, where the system keeps temporary files (``TMPDIR``, which should be on a disk); its space
    is taken at once, so that a full disk is an error here and not a crash later.

    Args:
        count: vectors.
        layout: of each.
        most: bytes together that may lie in memory; :func:`limit` where None.

    Raises:
        OSError: the disk has not as much left.
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


def _in_file(nbytes: int) -> Tensor:
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
    return torch.from_numpy(memory)


def open_again(path: str | Path, mode: int) -> Stored:
    """A file that is mapped, for :func:`remember`: how the mapping is read ahead shall not depend on what is read here.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, mode | os.O_CLOEXEC)
    if hasattr(os, "posix_fadvise"):  # a window ahead in each of a thousand files is more than memory holds
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        os.preadv(descriptor, [bytearray(1)], 0, UNCACHED)
    except (OSError, AttributeError):  # what the cache holds is read from there, and at half the cost
        return Stored(descriptor, 0, 0, None)
    try:
        return Stored(descriptor, 0, UNCACHED, os.open(path, mode | os.O_CLOEXEC | DIRECT) if DIRECT else None)
    except OSError:
        return Stored(descriptor, 0, UNCACHED, None)


def remember(memory: np.ndarray, opened: Stored) -> None:
    """What is mapped in ``memory`` from the file's begin on; it is closed when nobody sees the memory."""
    if not hasattr(os, "preadv"):  # its pages are touched instead
        opened.close()
        return
    address = memory.ctypes.data
    _mapped[address] = memory.nbytes, opened
    weakref.finalize(memory, _forget, address).atexit = False  # others may still see it then


def _forget(address: int) -> None:
    _, file = _mapped.pop(address)
    file.close()


class Stored(NamedTuple):
    """Where a flat vector lies in a file; as long as the vector lives.

    Attributes:
        descriptor: of the file.
        at: the byte at which the vector begins.
        flags: of every call.
        direct: another descriptor, for whole pages to and from memory that begins at a sector; it costs a third.
    """

    descriptor: int
    at: int
    flags: int
    direct: int | None

    def read(self, start: int, into: np.ndarray) -> None:
        """Into (n,) contiguous, from byte ``start`` of the vector on.

        Raises:
            OSError: the file is shorter, or the disk fails.
        """
        self._all(os.preadv, start, into)

    def write(self, start: int, new: np.ndarray) -> None:
        """New (n,) contiguous, from byte ``start`` of the vector on; the mapped vector shows it.

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
                direct = None  # part of it is done, or the disk wants more than sectors
                continue
            if not done:
                raise OSError(errno.EIO, "the file of a vector is shorter than the vector")
            left, start = left[done:], start + done

    def close(self) -> None:
        """The file's descriptors."""
        os.close(self.descriptor)
        if self.direct is not None:
            os.close(self.direct)


def stored(flat: Tensor) -> Stored | None:
    """Where these entries lie; None where in no file, or in one that somebody else has mapped."""
    place = flat.data_ptr()
    for begin, (nbytes, file) in list(_mapped.items()):
        if begin <= place < begin + nbytes:
            return file._replace(at=place - begin)
    return None


class Shelf:
    """Keeps vectors that come one by one: in memory as long as they fit, then in files.

    Args:
        most: bytes that stay in memory; :func:`limit` where None.
    """

    def __init__(self, most: int | None = None) -> None:
        self._left = limit() if most is None else most
        self._free: dict[Layout, list[Params]] = {}

    def put(self, x: Params) -> Params:
        """The same vector, where it can stay; one that lies in a file stays there.

        Raises:
            OSError: the disk has not as much left.
        """
        if all(stored(flat) for flat in x.flats.values()):
            return x
        self._left -= x.nbytes
        if self._left >= 0 or not x.nbytes:
            return x
        free = self._free.setdefault(x.layout, [])
        if not free:
            free += room(max(min(FILE // x.nbytes, MANY), 1), x.layout, most=0)
        kept = free.pop()
        for dtype, flat in x.flats.items():
            if (file := stored(kept.flats[dtype])) is None:  # no entries
                kept.flats[dtype].copy_(flat)
            else:
                file.write(0, flat.view(torch.uint8).numpy())
        return kept


def shelved(vectors: Iterable[Params], most: int | None = None) -> list[Params]:
    """Each as it is made, put on one :class:`Shelf`: of a generator, never two that are made in memory together."""
    shelf = Shelf(most)
    return [shelf.put(x) for x in vectors]


class Vectors(dict[str, Params]):
    """A vector a client. Sums and differences are of the clients that both sides have, in the order of the right one:
    made one by one, each where :func:`shelved` puts it.

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
        """Every one less the same vector."""
        return self - dict.fromkeys(self, w)

    def cast(self, other: Mapping[str, Params]) -> Vectors:
        """In the dtypes of the other's vectors."""
        return self._with({i: other[i] for i in self}, lambda x, y: x.cast(y.layout))

    def _with(self, other: Mapping[str, Params], operation: Callable[[Params, Params], Params]) -> Vectors:
        both = [i for i in other if i in self]
        return Vectors(zip(both, shelved(operation(self[i], other[i]) for i in both), strict=True))
