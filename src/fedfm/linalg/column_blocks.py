"""Splits the columns of many vectors into pieces of work, and assigns threads and memory to them.

The layout and the number of vectors alone determine how a layer's columns are cut into stretches. One thread computes a
stretch, block after block: it copies the vectors' entries into the rows of one matrix and multiplies.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import local
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedfm.linalg.out_of_core import soon
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.threads import one_thread, torch_threads

BLOCK = 8192  # fewest columns in a block
MOST = 1 << 15  # most columns in a block: torch widens so many on one thread
ENTRIES = 1 << 18  # entries in a block of few vectors: they fit the caches
STRETCH = 1 << 18  # columns in one thread's sum
SHORT = 10**8  # multiplications that take less time than starting threads
LINE = 64  # bytes between rows, else rows of a power of two share few cache lines
NATIVE = {torch.float32: np.float32, torch.float64: np.float64}

R = TypeVar("R")
Rows = dict[torch.dtype, list[Any]]  # the vectors' flat entries by dtype; NumPy's arrays if NumPy has the dtype


class Span(NamedTuple):
    """Entries start to stop of the flat vector of one dtype."""

    dtype: torch.dtype
    start: int
    stop: int


class Stretch(NamedTuple):
    """Columns of one layer for one thread and dtype, ``block`` of them at once."""

    layer: int
    dtype: Any
    runs: list[Span]
    block: int


class Desk(local):
    """The buffers of one thread."""

    def __init__(self) -> None:
        self._buffers: dict[Any, np.ndarray] = {}

    def buffer(self, use: str, stretch: Stretch, count: int) -> np.ndarray:
        """A block of ``count`` vectors, reused for the next stretch: new memory costs more than a copy."""
        if (found := self._buffers.get((use, stretch.dtype))) is None:
            row = stretch.block + LINE // np.dtype(stretch.dtype).itemsize
            kind = torch.float64 if stretch.dtype is np.float64 else torch.float32
            found = self._buffers[use, stretch.dtype] = torch.empty(count, row, dtype=kind).numpy()
        return found


def in_order(
    function: Callable[[Stretch, Desk], R], runs: Sequence[Sequence[Span]], count: int, threads: int | None
) -> Iterator[tuple[Stretch, R]]:
    """Each stretch of all layers with the function's result, in order.

    Entries of float64 are computed in float64, others in float32. The bits do not depend on ``threads``.
    """
    block = max(BLOCK, min(MOST, ENTRIES // count // BLOCK * BLOCK))
    long = max(1, STRETCH // block) * block
    stretches = [
        Stretch(layer, dtype, part, block)
        for layer, of in enumerate(runs)
        for dtype in (np.float32, np.float64)
        for part in cut([r for r in of if (r.dtype == torch.float64) == (dtype is np.float64)], long)
    ]
    work = count * count * sum(r.stop - r.start for of in runs for r in of)
    workers = min(threads or os.cpu_count() or 1 if work > SHORT else 1, len(stretches))
    desk = Desk()

    def quiet(stretch: Stretch) -> R:
        with np.errstate(all="ignore"):  # results of a vector that is not finite are not finite
            return function(stretch, desk)

    with one_thread(), torch_threads(1):
        if workers <= 1:
            yield from zip(stretches, map(quiet, stretches), strict=True)
        else:
            with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield from zip(stretches, pool.map(quiet, stretches), strict=True)


def merged(layout: Layout, names: Iterable[str], floating: bool = True) -> list[Span]:
    """The entries of these names, or the floating-point ones, in as few runs as possible."""
    runs = [Span(*layout.slots[n][:3]) for n in names]
    runs = [r for r in runs if r.start < r.stop and (r.dtype.is_floating_point or not floating)]
    found: list[Span] = []
    for run in sorted(runs, key=lambda r: (str(r.dtype), r.start)):
        if found and found[-1].dtype == run.dtype and found[-1].stop == run.start:
            found[-1] = Span(run.dtype, found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def cut(runs: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Pieces of ``size`` columns; the last one may be shorter."""
    piece: list[Span] = []
    free = size
    for dtype, start, stop in runs:
        while start < stop:
            end = min(stop, start + free)
            piece.append(Span(dtype, start, end))
            free, start = free - (end - start), end
            if not free:
                yield piece
                piece, free = [], size
    if piece:
        yield piece


def rows_of(vectors: Sequence[Params]) -> Rows:
    """The floating-point entries."""
    dtypes = [d for d in vectors[0].layout.sizes if d.is_floating_point] if vectors else []
    return {d: [x.flats[d].numpy() if d in NATIVE else x.flats[d] for x in vectors] for d in dtypes}


def blocks(stretch: Stretch, rows: Rows, buffer: np.ndarray) -> Iterator[tuple[list[Span], np.ndarray]]:
    """Runs, and the entries of all vectors in them (K, n), in the buffer and its dtype."""
    for dtype, start, stop in stretch.runs:
        for x in rows[dtype]:
            soon(x[start:stop] if isinstance(x, torch.Tensor) else torch.from_numpy(x[start:stop]))
    for runs in cut(stretch.runs, stretch.block):
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            for row, x in zip(buffer[:, here], rows[dtype], strict=True):
                if dtype in NATIVE:
                    row[:] = x[start:stop]
                else:
                    torch.from_numpy(row).copy_(x[start:stop])
        yield runs, buffer[:, :at]


def put(out: Any, new: np.ndarray, onto: Any | None) -> None:
    """Write ``onto`` + ``new`` to ``out``; both are slices of :data:`Rows`."""
    if isinstance(out, np.ndarray):
        if onto is None:
            out[:] = new
        else:
            np.add(onto, new, out=out)
    else:
        wide = torch.from_numpy(new)
        out.copy_(wide if onto is None else wide + onto)
