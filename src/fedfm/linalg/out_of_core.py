"""Memory-maps vectors that exceed memory to anonymous files; each is an ordinary tensor."""

from __future__ import annotations

import mmap
import operator
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Layout, Params

ALIGNED = 64  # bytes: a vector begins at a cache line
FILE, MANY = 1 << 28, 1000  # most bytes and vectors of a shelf in one file

_mapped: dict[int, mmap.mmap] = {}  # address -> the mapped file


def limit() -> int:
    """Bytes of memory for the vectors of one kind (a round's replies, its results, the server's state): the environment
    variable ``FEDFM_MEMORY``, else a quarter of the machine's memory.

    Raises:
        InputError: ``FEDFM_MEMORY`` is no number of bytes.
    """
    given = os.environ.get("FEDFM_MEMORY")
    if given is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    if not given.isdecimal():
        raise InputError(f'FEDFM_MEMORY = "{given}": expected a number of bytes, e.g. 4000000000')
    return int(given)


def allocate(count: int, layout: Layout, most: int | None = None) -> list[Params]:
    """Uninitialised vectors, to be written once before they are read.

    They share one buffer, which is free again when none of them is referenced: the next round reuses it, since new
    memory costs more than the weighted sums. More than ``most`` bytes are mapped from an anonymous file in the folder
    of temporary files (``TMPDIR``, which should be on a disk). Its space is allocated at once, so that a full disk is
    an error here and not a crash later.

    Args:
        count: number of vectors.
        layout: of each.
        most: bytes of all vectors that may be in memory; None: :func:`limit`.

    Raises:
        OSError: the disk is full.
    """
    fits = count * layout.nbytes <= (limit() if most is None else most)
    steps = {d: -(-size * d.itemsize // ALIGNED) * ALIGNED for d, size in layout.sizes.items()}
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
    with tempfile.TemporaryFile() as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = np.memmap(file, np.uint8, "r+", shape=(nbytes,))
    remember(memory, memory._mmap)  # type: ignore[attr-defined]
    return torch.from_numpy(memory)


def remember(memory: np.ndarray, file: mmap.mmap) -> None:
    """Let :func:`in_file` know that a file is mapped in ``memory``, as long as that is referenced."""
    address = memory.ctypes.data
    _mapped[address] = file
    weakref.finalize(memory, _mapped.pop, address).atexit = False  # the memory may still be in use at exit


def in_file(flat: Tensor) -> bool:
    """Whether these entries are in a file that this process has mapped."""
    return _place(flat.data_ptr()) is not None


def soon(flat: Tensor) -> None:
    """Read entries that are in a file ahead, in one piece: page by page the disk takes several times as long."""
    if (found := _place(flat.data_ptr())) and hasattr(mmap, "MADV_WILLNEED"):
        file, at = found
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        file.madvise(mmap.MADV_WILLNEED, begin, at + flat.nbytes - begin)


def _place(address: int) -> tuple[mmap.mmap, int] | None:
    """The mapped file that has this address, and where."""
    for begin, file in list(_mapped.items()):
        if begin <= address < begin + len(file):
            return file, address - begin
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
        """The same vector in its place; a vector in a file stays there.

        Raises:
            OSError: the disk is full.
        """
        if all(map(in_file, x.flats.values())):
            return x
        self._left -= x.nbytes
        if self._left >= 0 or not x.nbytes:
            return x
        free = self._free.setdefault(x.layout, [])
        if not free:
            free += allocate(max(min(FILE // x.nbytes, MANY), 1), x.layout, most=0)
        kept = free.pop()
        for dtype, flat in x.flats.items():
            kept.flats[dtype].copy_(flat)
        return kept


def shelved(vectors: Iterable[Params], most: int | None = None) -> list[Params]:
    """The vectors on one :class:`Shelf`; of a generator at most one new vector is in memory."""
    shelf = Shelf(most)
    return [shelf.put(x) for x in vectors]


class Vectors(dict[str, Params]):
    """A vector for each client. Sums and differences contain the clients of both sides, in the order of the right one;
    their vectors are computed one by one and kept by :func:`shelved`.

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
        return Vectors(zip(both, shelved(operation(self[i], other[i]) for i in both), strict=True))
