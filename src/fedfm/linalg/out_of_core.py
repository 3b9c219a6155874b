"""Stores vectors in memory-mapped anonymous files if they are too large for memory. They stay ordinary tensors.

:mod:`fedfm.linalg.mapped_files` makes, reads and writes the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from fedfm.errors import InputError
from fedfm.linalg import pages
from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Layout, Params

ALIGNED = 64  # bytes: a vector begins at a cache line
FILE, MANY = 1 << 28, 1000  # largest numbers of bytes and of vectors that a VectorStore puts into one file


def limit() -> int:
    """Bytes of memory that vectors of one purpose, e.g. a round's replies, may take.

    This is the environment variable ``FEDFM_MEMORY``, by default a quarter of the machine's memory.

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

    They share one buffer, which is free again when none of them is used any more. The next round reuses the buffer,
    because new memory takes more time than the weighted sums. If the vectors take more than ``most`` bytes, the buffer
    is a mapped anonymous file in the folder of temporary files (``TMPDIR``, which should be on a disk). The space of
    the file is allocated here, so that a full disk is an error now and no crash later.

    Args:
        count: number of vectors.
        layout: the layout of each vector.
        most: bytes that all vectors together may take in memory; None: :func:`limit`.

    Raises:
        OSError: the disk is full.
    """
    from fedfm.linalg.mapped_files import PAGE, bytes_in_file

    fits = count * layout.nbytes <= (limit() if most is None else most)
    sizes = {d: size * d.itemsize for d, size in layout.sizes.items()}
    align = {d: ALIGNED if fits or n < 16 * PAGE else PAGE for d, n in sizes.items()}
    steps = {d: -(-n // align[d]) * align[d] for d, n in sizes.items()}
    nbytes = count * sum(steps.values())
    memory = buffers.empty(nbytes, torch.uint8) if fits else bytes_in_file(nbytes)
    made, at = [], 0
    for _ in range(count):
        flats = {}
        for dtype, size in layout.sizes.items():
            flats[dtype] = memory[at : at + size * dtype.itemsize].view(dtype)
            at += steps[dtype]
        made.append(Params.from_flat(layout, flats))
    return made


def to_file(x: Params) -> Params:
    """Move a vector of at least :data:`pages.LARGE` bytes to an anonymous file, if the disk has room."""
    if x.nbytes < pages.LARGE or len(x.flats) > 1:
        return x
    from fedfm.linalg.mapped_files import bytes_in_file

    ((dtype, flat),) = x.flats.items()
    try:
        memory = bytes_in_file(x.nbytes, passed=True).view(dtype)
    except OSError:
        return x
    memory.copy_(flat)
    pages.release(memory)
    return Params.from_flat(x.layout, {dtype: memory})


class VectorStore:
    """Keeps vectors that arrive one by one: in memory while they fit, then in files.

    Args:
        most: bytes that the vectors may take in memory; None: :func:`limit`.
    """

    def __init__(self, most: int | None = None) -> None:
        self._left = limit() if most is None else most
        self._free: dict[Layout, list[Params]] = {}

    def put(self, x: Params) -> Params:
        """Store a vector and return it; a vector in a file stays there.

        Raises:
            OSError: the disk is full.
        """
        from fedfm.linalg.mapped_files import location_of

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
            if (file := location_of(kept.flats[dtype])) is None:  # the vector has no entries
                kept.flats[dtype].copy_(flat)
            else:
                file.write(0, flat.view(torch.uint8).numpy())
        return kept


def keep_all(vectors: Iterable[Params], most: int | None = None) -> list[Params]:
    """Put the vectors into one :class:`VectorStore`, each vector of a generator before the next one is computed."""
    store = VectorStore(most)
    return [store.put(x) for x in vectors]
