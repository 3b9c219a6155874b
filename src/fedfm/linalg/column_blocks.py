"""Columns of many vectors side by side: which are computed together, on which thread, in what memory they lie.

A layer's columns are cut into stretches, by nothing but the layout and the number of vectors. One thread computes a
stretch, window after window: the vectors' entries there, copied or read from their files into the rows of one matrix,
of which a fixed number of columns is multiplied at once. While one thread waits for the disk another one computes. With
files there is in memory at most 1 GiB of windows, or two blocks a thread where that is more.
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

from fedfm.linalg.out_of_core import SECTOR, stored
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.threads import one_thread, torch_threads

BLOCK = 8192  # columns side by side, at least
MOST = 1 << 15  # columns side by side: torch widens so many on one thread
PIECE = 1 << 16  # columns of a file at a time: to and from the disk, 128 KiB a call cost as much time as 256
ENTRIES = 1 << 18  # side by side, of few vectors: what the caches hold
STRETCH = 1 << 18  # columns whose sum one thread makes
SHORT = 10**8  # multiplications that take less time than threads to start
WINDOWS = 1 << 30  # bytes of files that all threads hold at most: shorter pieces cost more calls and waits
LINE = 64  # bytes between rows: a power of two apart they would share a few lines of a cache; files need a sector
NATIVE = {torch.float32: np.float32, torch.float64: np.float64}

R = TypeVar("R")


class Span(NamedTuple):
    """Entries start to stop of the flat vector of one dtype."""

    dtype: torch.dtype
    start: int
    stop: int


class Stretch(NamedTuple):
    """Columns of one layer, which one thread computes in one dtype: ``block`` at once, of ``window`` in memory."""

    layer: int
    dtype: Any
    runs: list[Span]
    block: int
    window: int


class Schedule(NamedTuple):
    """Stretches, how many threads take them, and how many of these compute at a time; the others wait for the disk.

    Attributes:
        apart: bytes by which a window's rows lie further apart than they are long.
    """

    stretches: list[Stretch]
    threads: int
    computing: int
    apart: int


# --- what is computed where -------------------------------------------------------------------------------------------


def planned(runs: Sequence[Sequence[Span]], count: int, files: bool, threads: int | None) -> Schedule:
    """Of every layer: float64 entries in float64, others in float32."""
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


def in_order(function: Callable[[Stretch, Desk], R], plan: Schedule) -> Iterator[tuple[Stretch, R]]:
    """Every stretch and what the function makes of it, in their order."""
    stretches, threads, computing, apart = plan
    desk = Desk(Semaphore(computing), apart)

    def quiet(stretch: Stretch) -> R:
        with np.errstate(all="ignore"):  # a vector that is not finite shows in what it gives
            return function(stretch, desk)

    with one_thread(), torch_threads(1):
        if threads <= 1:
            yield from zip(stretches, map(quiet, stretches), strict=True)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield from zip(stretches, pool.map(quiet, stretches), strict=True)


def merged(layout: Layout, names: Iterable[str], floating: bool = True) -> list[Span]:
    """The entries of these names in as few runs as there are; only the floating-point ones, if so."""
    runs = (Span(*layout.slots[n][:3]) for n in names)
    return _joined(
        sorted(
            (r for r in runs if r.start < r.stop and (r.dtype.is_floating_point or not floating)),
            key=lambda r: (str(r.dtype), r.start),
        )
    )


def _joined(runs: Iterable[Span]) -> list[Span]:
    """Those that follow each other as one."""
    found: list[Span] = []
    for run in runs:
        if found and found[-1].dtype == run.dtype and found[-1].stop == run.start:
            found[-1] = Span(run.dtype, found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def cut(runs: Iterable[Span], size: int) -> Iterator[list[Span]]:
    """Pieces of so many columns, the last one of what is left."""
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
    """How many there are."""
    return sum(run.stop - run.start for run in stretch.runs)


# --- where it lies ----------------------------------------------------------------------------------------------------


class Desk(local):
    """What a thread computes on: one thread's is not seen by another.

    Attributes:
        turn: to be held while computing, for as many threads as may do so at a time.
    """

    def __init__(self, turn: Semaphore, apart: int) -> None:
        self.turn = turn
        self._apart = apart
        self._buffers: dict[Any, np.ndarray] = {}

    def buffer(self, use: str, stretch: Stretch, count: int) -> np.ndarray:
        """A window of so many vectors; the next stretch has the same, for fresh memory costs more than a copy."""
        if (found := self._buffers.get((use, stretch.dtype))) is None:
            apart = self._apart // np.dtype(stretch.dtype).itemsize
            row = stretch.window + apart
            room = np.empty(count * row + apart, stretch.dtype)
            begin = -room.ctypes.data % self._apart // room.itemsize
            found = self._buffers[use, stretch.dtype] = room[begin : begin + count * row].reshape(count, row)
        return found


class Row:
    """The flat vector of one dtype, in memory or in a file: of NumPy where it has the dtype."""

    def __init__(self, flat: Tensor) -> None:
        self.flat: Any = flat.numpy() if flat.dtype in NATIVE else flat
        self.file = stored(flat)

    def part(self, start: int, stop: int) -> Any:
        """These entries: a view, or a copy of what is in the file."""
        here = self.flat[start:stop]
        if self.file is None:
            return here
        copy = torch.empty(stop - start, dtype=here.dtype) if isinstance(here, Tensor) else np.empty_like(here)
        self.file.read(start * here.itemsize, _bytes(copy))
        return copy

    def copy(self, start: int, stop: int, into: np.ndarray) -> None:
        """These entries, in the dtype of ``into``."""
        if self.file is not None and self.flat.dtype == into.dtype:
            self.file.read(start * into.itemsize, into)
        elif isinstance(self.flat, Tensor):
            torch.from_numpy(into).copy_(self.part(start, stop))
        else:
            into[:] = self.part(start, stop)

    def put(self, start: int, new: np.ndarray, onto: Any | None) -> None:
        """Write ``onto`` + ``new``, which may be overwritten, from ``start`` on."""
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
    """Of the floating-point entries, by dtype."""
    dtypes = [d for d in vectors[0].layout.sizes if d.is_floating_point] if vectors else []
    return {d: [Row(x.flats[d]) for x in vectors] for d in dtypes}


def in_files(*several: Rows) -> bool:
    """Whether any of them lies in a file."""
    return any(row.file is not None for rows in several for of in rows.values() for row in of)


def windows(stretch: Stretch, rows: Rows, buffer: np.ndarray) -> Iterator[tuple[list[Span], np.ndarray]]:
    """Runs, and all vectors' entries of them side by side, (K, n), in the dtype of the buffer, which has them."""
    for runs in cut(stretch.runs, stretch.window):
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            for row, x in zip(buffer[:, here], rows[dtype], strict=True):
                x.copy(start, stop, row)
        yield runs, buffer[:, :at]


def blocks(stretch: Stretch, window: np.ndarray) -> Iterator[np.ndarray]:
    """Of so many columns as are multiplied at once, the last one of what is left."""
    for at in range(0, window.shape[1], stretch.block):
        yield window[:, at : at + stretch.block]


def _bytes(x: Any) -> np.ndarray:
    return x.view(torch.uint8).numpy() if isinstance(x, Tensor) else x
