"""Splits the columns of many vectors into pieces of work, and assigns threads and memory to them.

The vectors are the rows of a matrix; a column is one entry of each vector. Columns are divided three times:

- A *stretch* is the work of one thread: columns of one layer.
- A *window* is the part of a stretch that is in memory at a time. Its entries are copied or read into one matrix.
- A *block* is the part of a window that is multiplied at once.

Only the layout and the number of vectors determine the stretches and blocks, so that results do not depend on the
number of threads. While one thread waits for the disk, another one computes. If vectors are in files, all windows
together take at most 1 GiB of memory, or two blocks for each thread if that is more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore, local
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedfm.linalg.mapped_files import SECTOR, location_of
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.threads import one_thread, torch_threads

BLOCK = 8192  # smallest number of columns in a block
MOST = 1 << 15  # largest number of columns in a block: torch converts up to this many entries on one thread
PIECE = 1 << 16  # columns of one read (256 KiB of a vector): a read of half the size would take as much time
ENTRIES = 1 << 18  # entries in a block of few vectors: this many fit into the caches
STRETCH = 1 << 18  # columns in a stretch
SHORT = 10**8  # multiplications; fewer take less time than the start of threads
WINDOWS = 1 << 30  # largest number of bytes of all threads' windows: smaller windows would need more reads and waits
LINE = 64  # bytes of padding behind a row: without it, rows whose length is a power of two compete for cache lines
NATIVE = {torch.float32: np.float32, torch.float64: np.float64}

R = TypeVar("R")


class Span(NamedTuple):
    """The entries from ``start`` to ``stop`` of the flat vector of one dtype."""

    dtype: torch.dtype
    start: int
    stop: int


class Stretch(NamedTuple):
    """Columns of one layer and dtype, for one thread.

    Attributes:
        runs: the spans of the columns.
        block: number of columns that are multiplied at once.
        window: number of columns in memory at a time.
    """

    layer: int
    dtype: Any
    runs: list[Span]
    block: int
    window: int


class Schedule(NamedTuple):
    """The stretches and the threads for them.

    Attributes:
        threads: number of threads.
        computing: number of threads that compute at a time; the others wait for the disk.
        apart: bytes of padding behind each row of a window. A window's address is a multiple of it.
    """

    stretches: list[Stretch]
    threads: int
    computing: int
    apart: int


# --- the schedule -----------------------------------------------------------------------------------------------------


def schedule_of(runs: Sequence[Sequence[Span]], count: int, files: bool, threads: int | None) -> Schedule:
    """The schedule of all layers. Entries in float64 are computed in float64, all others in float32."""
    block = max(BLOCK, min(MOST, ENTRIES // count // BLOCK * BLOCK))
    long = max(1, STRETCH // block) * block
    pieces = [
        (layer, dtype, part)
        for layer, of in enumerate(runs)
        for dtype in (np.float32, np.float64)
        for part in cut([r for r in of if (r.dtype == torch.float64) == (dtype is np.float64)], long)
    ]
    work = count * count * sum(r.stop - r.start for of in runs for r in of)
    computing = threads or os.cpu_count() or 1 if work > SHORT else 1
    workers = min(computing + files, len(pieces))
    fit = min(PIECE, long, WINDOWS // (max(workers, 1) * 2 * count * 4)) if files else 0
    window = max(1, fit // block) * block
    return Schedule([Stretch(*of, block, window) for of in pieces], workers, computing, SECTOR if files else LINE)


def in_order(function: Callable[[Stretch, Workspace], R], plan: Schedule) -> Iterator[tuple[Stretch, R]]:
    """Apply the function to every stretch; yields (stretch, result) in the order of the stretches."""
    stretches, threads, computing, apart = plan
    workspace = Workspace(Semaphore(computing), apart)

    def quiet(stretch: Stretch) -> R:
        with np.errstate(all="ignore"):  # a vector with NaN or infinity gives such results, without a warning
            return function(stretch, workspace)

    with one_thread(), torch_threads(1):
        if threads <= 1:
            yield from zip(stretches, map(quiet, stretches), strict=True)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield from zip(stretches, pool.map(quiet, stretches), strict=True)


def join_spans(layout: Layout, names: Iterable[str], floating: bool = True) -> list[Span]:
    """The entries of the named tensors in as few spans as possible; with ``floating`` only floating-point entries."""
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
    """Cut the spans into pieces of ``size`` columns; the last one may be shorter."""
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


def columns_of(stretch: Stretch) -> int:
    """The number of columns of a stretch."""
    return sum(run.stop - run.start for run in stretch.runs)


# --- memory and files -------------------------------------------------------------------------------------------------


class Workspace(local):
    """The buffers of one thread.

    Attributes:
        turn: a semaphore that limits the number of threads that compute at a time.
    """

    def __init__(self, turn: Semaphore, apart: int) -> None:
        self.turn = turn
        self._apart = apart
        self._buffers: dict[Any, np.ndarray] = {}

    def buffer(self, use: str, stretch: Stretch, count: int) -> np.ndarray:
        """Memory for a window of ``count`` vectors. The next stretch reuses it: new memory takes longer than a copy."""
        if (found := self._buffers.get((use, stretch.dtype))) is None:
            apart = self._apart // np.dtype(stretch.dtype).itemsize
            row = stretch.window + apart
            scratch = np.empty(count * row + apart, stretch.dtype)
            begin = -scratch.ctypes.data % self._apart // scratch.itemsize
            found = self._buffers[use, stretch.dtype] = scratch[begin : begin + count * row].reshape(count, row)
        return found


class Row:
    """The flat vector of one dtype, in memory or in a file; a NumPy array if NumPy has the dtype."""

    def __init__(self, flat: Tensor) -> None:
        self.flat: Any = flat.numpy() if flat.dtype in NATIVE else flat
        self.file = location_of(flat)

    def part(self, start: int, stop: int) -> Any:
        """These entries: a view, or a copy from the file."""
        here = self.flat[start:stop]
        if self.file is None:
            return here
        copy = torch.empty(stop - start, dtype=here.dtype) if isinstance(here, Tensor) else np.empty_like(here)
        self.file.read(start * here.itemsize, _bytes(copy))
        return copy

    def copy(self, start: int, stop: int, into: np.ndarray) -> None:
        """Copy these entries, in the dtype of ``into``."""
        if self.file is not None and self.flat.dtype == into.dtype:
            self.file.read(start * into.itemsize, into)
        elif isinstance(self.flat, Tensor):
            torch.from_numpy(into).copy_(self.part(start, stop))
        else:
            into[:] = self.part(start, stop)

    def put(self, start: int, new: np.ndarray, onto: Any | None) -> None:
        """Write ``onto`` + ``new`` to the entries from ``start`` on; may overwrite ``new``."""
        out = self.flat[start : start + len(new)]
        if isinstance(out, Tensor):
            wide = torch.from_numpy(new)
            total = wide if onto is None else wide + onto
            if self.file is None:
                out.copy_(total)
            else:
                self.file.write(start * out.itemsize, _bytes(total.to(out.dtype)))
        elif self.file is None:
            if onto is None:
                out[:] = new
            else:
                np.add(onto, new, out=out)
        else:
            self.file.write(start * out.itemsize, new if onto is None else np.add(onto, new, out=new))


Rows = dict[torch.dtype, list[Row]]


def rows_of(vectors: Sequence[Params]) -> Rows:
    """The vectors' floating-point entries: for each dtype, a :class:`Row` for each vector."""
    dtypes = [d for d in vectors[0].layout.sizes if d.is_floating_point] if vectors else []
    return {d: [Row(x.flats[d]) for x in vectors] for d in dtypes}


def in_files(*several: Rows) -> bool:
    """Whether any of these vectors is in a file."""
    return any(row.file is not None for rows in several for of in rows.values() for row in of)


def windows(stretch: Stretch, rows: Rows, buffer: np.ndarray) -> Iterator[tuple[list[Span], np.ndarray]]:
    """Yield each window: its spans, and the entries (K, n) of all vectors in these spans, a view of the buffer."""
    for runs in cut(stretch.runs, stretch.window):
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            for row, x in zip(buffer[:, here], rows[dtype], strict=True):
                x.copy(start, stop, row)
        yield runs, buffer[:, :at]


def blocks(stretch: Stretch, window: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the blocks of a window; the last one may be shorter."""
    for at in range(0, window.shape[1], stretch.block):
        yield window[:, at : at + stretch.block]


def _bytes(x: Any) -> np.ndarray:
    return x.view(torch.uint8).numpy() if isinstance(x, Tensor) else x
