"""All inner products of K parameter vectors, and all mixtures of them, as matrix products.

What a server computes whose clients each get a model of their own (FedBip, equations 3 to 6; FedAMP): K^2 inner
products and K weighted sums of K vectors. One by one they read memory 2 K^2 times; here a block of columns of all
vectors is put side by side and multiplied at once, so that each vector is read once for the products and once for the
sums, and both run at the speed of the machine's matrix product.

Vectors and results may lie in files that are larger than memory (``fedfm.spill``). They are read and written through
windows of columns, and while one thread waits for the disk another one computes: in memory is at most 1 GiB of
windows, or two blocks a thread where that is more, and a few K x K matrices. Every bit is the same in files and for any
number of threads: blocks are fixed, each is computed by one thread, and sums are made in the order of the blocks.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore, local
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedfm.params import Layout, Params
from fedfm.spill import SECTOR, room, stored
from fedfm.threads import one_thread, torch_threads

INNER = 512  # entries that one float32 product sums: the rounding of 10^6 such sums cancels out
LOOP = 1 << 18  # entries side by side from which a compiled loop puts them there
LONG = 1 << 16  # of a layer: fewer sums do not cancel well enough for 1e-7, and are cheap to make in float64
BLOCK = 8192  # columns side by side, at least
MOST = 1 << 15  # columns side by side: torch widens so many on one thread
PIECE = 1 << 16  # columns of a file at a time: a call costs what 300 KB cost, and longer ones leave no stretch to wait
ENTRIES = 1 << 18  # side by side, of few vectors: what the caches hold
STRETCH = 1 << 18  # columns whose sum one thread makes
WIDE = 1024  # columns of a product that MKL computes to the same bits wherever in memory they lie; of one it does not
SHORT = 10**8  # multiplications that take less time than threads to start
WINDOWS = 1 << 30  # bytes of files that all threads hold at most: shorter pieces cost more calls and waits
NATIVE = {torch.float32: np.float32, torch.float64: np.float64}

R = TypeVar("R")


class Run(NamedTuple):
    """Entries start to stop of the flat vector of one dtype."""

    dtype: torch.dtype
    start: int
    stop: int


class Stretch(NamedTuple):
    """Columns of one layer, which one thread computes in one dtype: ``block`` at once, of ``window`` in memory."""

    layer: int
    dtype: Any
    runs: list[Run]
    block: int
    window: int


def gram(
    vectors: Sequence[Params],
    layers: Sequence[Sequence[str]] | None = None,
    *,
    centre: bool = False,
    threads: int | None = None,
) -> np.ndarray:
    """Inner products <x_i, x_k> of all pairs, layer by layer: what cosines, norms and distances follow from.

    Cosines made of it are within 1e-7 of those in float64: products run in float32 over 512 entries at a time, sums of
    these in float64; layers of fewer than 65,536 entries, and float64 entries, in float64 throughout.

    Args:
        vectors: K of one layout; 16-bit entries are widened block by block.
        layers: names of each layer's tensors, in any order; one layer of all where None. Only floating-point entries
            count.
        centre: of x_i less its own mean over the layer's entries (Pearson); reads the vectors twice.
        threads: at most; as many as there are cores where None. The bits do not depend on it.

    Returns:
        (L, K, K) float64, symmetric; not finite in the row and the column of a vector that is not.

    Raises:
        KeyError: names differ, or a layer's name is not there.
        ValueError: shapes or dtypes differ, a name is in two layers, or there is no vector.

    Example:
        >>> tau = [Params({"w": torch.tensor(t)}) for t in ([3.0, 0.0], [3.0, 4.0], [0.0, -2.0])]
        >>> gram(tau)[0].tolist()
        [[9.0, 9.0, 0.0], [9.0, 25.0, -8.0], [0.0, -8.0, 4.0]]
    """
    layout = _layout_of(vectors)
    runs = [_merged(layout, names) for names in _checked(layout, layers)]
    count, sizes = len(vectors), [sum(r.stop - r.start for r in of) for of in runs]
    rows = _rows(vectors)
    plan = _plan(runs, count, _in_files(rows), wide=[size < LONG for size in sizes], threads=threads)
    means = np.zeros((len(runs), count))
    found = np.zeros((len(runs), count, count))
    if centre:
        for at, sums in _in_order(lambda s, desk: _sums(s, rows, desk, count), plan):
            means[at.layer] += sums / sizes[at.layer]
    for at, products in _in_order(lambda s, desk: _products(s, rows, desk, means[s.layer]), plan):
        found[at.layer] += products
    return found


def mix(
    weights: np.ndarray,
    vectors: Sequence[Params],
    layers: Sequence[Sequence[str]] | None = None,
    onto: Sequence[Params] | None = None,
    *,
    threads: int | None = None,
    most: int | None = None,
) -> list[Params]:
    """Onto_i + sum_k weights[l, i, k] x_k for every row i, layer by layer: FedBip, Algorithm 1, lines 8 to 17.

    Sums run in float32 (float64 for float64 entries). An ``onto`` that is one vector for all is a term of them, others
    are added last.

    Args:
        weights: (L, M, K).
        vectors: K of one layout; read once.
        layers: as :func:`gram` takes them.
        onto: M of the same layout, or one of them M times; the sums alone where None.
        threads: as :func:`gram` takes them.
        most: bytes of results up to which they lie in memory, as :func:`fedfm.spill.room` takes it.

    Returns:
        M of the same layout. What is in no layer, and what is not floating-point, is ``onto``'s, or that of
        ``vectors`` where M = K.

    Raises:
        KeyError: names differ, or a layer's name is not there.
        ValueError: shapes or dtypes differ, a name is in two layers, the weights are not (L, M, K), or nothing says
            what the entries outside the layers shall be.
        OSError: the results fit neither into ``most`` nor on the disk.

    Example:
        >>> tau = [Params({"w": torch.tensor(t)}) for t in ([3.0, 0.0], [3.0, 4.0])]
        >>> [m["w"].tolist() for m in mix(np.array([[[0.5, 0.5], [0.0, 1.0]]]), tau)]
        [[3.0, 2.0], [3.0, 4.0]]
    """
    layout = _layout_of(vectors)
    checked = _checked(layout, layers)
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 3 or weights.shape[::2] != (len(checked), len(vectors)):
        raise ValueError(f"weights of shape {weights.shape}, expected ({len(checked)}, M, {len(vectors)})")
    count = weights.shape[1]
    for x in onto or ():
        x.check_like(layout)
    if onto is not None and len(onto) != count:
        raise ValueError(f"{len(onto)} vectors to add to, for {count} rows of weights")
    inside = {n for names in checked for n in names if layout.slots[n][0].is_floating_point}
    rest = _merged(layout, (n for n in layout.slots if n not in inside), floating=False)
    base = onto if onto is not None else vectors if len(vectors) == count else None
    if rest and base is None:
        raise ValueError(f"entries outside the layers: {count} rows of weights for {len(vectors)} vectors need onto")
    made = room(count, layout, most)
    if not made:
        return []
    runs = [_merged(layout, names) for names in checked]
    if onto is not None and all(x is onto[0] for x in onto):  # one more term of each sum, not one more pass
        weights = np.concatenate([weights, np.ones((len(weights), count, 1))], axis=2)
        vectors, onto = [*vectors, onto[0]], None
    rows, targets, added = _rows(vectors), _rows(made), None if onto is None else _rows(onto)
    files = _in_files(rows, targets, added or {})
    plan = _plan(runs, max(count, len(vectors)), files, wide=[False] * len(runs), threads=threads)
    matrices = {dtype: _matrix(of) for dtype, of in targets.items()}
    for _ in _in_order(lambda s, desk: _mix(s, weights[s.layer], rows, added, targets, matrices, desk), plan):
        pass
    for i, new in enumerate(made):
        for dtype, start, stop in rest:
            new.flats[dtype][start:stop] = base[i].flats[dtype][start:stop]  # type: ignore[index]
    return made


# --- what one thread computes -----------------------------------------------------------------------------------------


def _products(stretch: Stretch, rows: Rows, desk: Desk, means: np.ndarray) -> np.ndarray:
    """(K, K) float64: inner products over the stretch, of entries less their means."""
    count = len(means)
    total = np.zeros((count, count))
    near = means.astype(stretch.dtype)  # what is left of the mean, after its rounding, has no weight beside the spread
    size = 0
    for _, window in _windows(stretch, rows, desk.buffer("x", stretch, count)):
        size += window.shape[1]
        with desk.turn:
            for x in _blocks(stretch, window):  # (K, n)
                if near.any():
                    x -= near[:, None]
                if x.dtype == np.float64:
                    total += x @ x.T
                    continue
                whole = x.shape[1] - x.shape[1] % INNER
                if whole:
                    pieces = x[:, :whole].reshape(count, -1, INNER).transpose(1, 0, 2)  # (n / INNER, K, INNER), a view
                    _add_squares(total, pieces)
                if whole < x.shape[1]:
                    _add_squares(total, x[None, :, whole:])
    left = means - near
    total -= size * np.outer(left, left)
    return total


def _add_squares(total: np.ndarray, pieces: np.ndarray) -> None:
    """Total += sum of x x^T over the pieces (n, K, INNER), summed in float64."""
    few = max(1, ENTRIES // total.size)  # whose products the caches hold
    for at in range(0, len(pieces), few):
        x = pieces[at : at + few]
        found = x @ x.transpose(0, 2, 1)  # NumPy sees that it is symmetric, and computes one half
        if len(found) == 1:
            np.add(total, found[0], out=total)
        else:
            total += found.sum(0, dtype=np.float64)


def _sums(stretch: Stretch, rows: Rows, desk: Desk, count: int) -> np.ndarray:
    """(K,) float64."""
    total = np.zeros(count)
    for _, window in _windows(stretch, rows, desk.buffer("x", stretch, count)):
        with desk.turn:
            for x in _blocks(stretch, window):
                total += x.sum(1, dtype=np.float64)
    return total


def _mix(
    stretch: Stretch,
    weights: np.ndarray,
    rows: Rows,
    added: Rows | None,
    targets: Rows,
    matrices: Mapping[torch.dtype, np.ndarray | None],
    desk: Desk,
) -> None:
    """Write onto + weights x over the stretch into the targets."""
    weights = weights.astype(stretch.dtype)  # (M, K)
    for runs, x in _windows(stretch, rows, desk.buffer("x", stretch, weights.shape[1])):
        dtype, start, stop = runs[0]
        matrix = matrices[dtype]
        if direct := matrix is not None and len(runs) == 1 and matrix.dtype == stretch.dtype:
            y = matrix[:, start:stop]  # (M, n), the targets themselves
        else:
            y = desk.buffer("y", stretch, len(weights))[:, : x.shape[1]]
        with desk.turn:
            for x_n, y_n in zip(_blocks(stretch, x), _blocks(stretch, y), strict=True):
                _product(weights, x_n, y_n)
        if direct and added is None:
            continue
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            for i, row in enumerate(y[:, here]):
                targets[dtype][i].put(start, row, added and added[dtype][i].part(start, stop))


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Out = a b, of matrices whose rows are contiguous."""
    if _intel() and out.shape[1] >= WIDE:
        torch.mm(torch.from_numpy(a), torch.from_numpy(b), out=torch.from_numpy(out))
    else:
        np.matmul(a, b, out=out)


@functools.cache
def _intel() -> bool:
    """Whether torch's library, MKL, multiplies these shapes faster than NumPy's, OpenBLAS: on Intel's processors by a
    tenth, on others the reverse by a fifth. Named and not timed, so that a machine's bits stay the same.
    """
    cpus = Path("/proc/cpuinfo")
    name = cpus.read_text() if cpus.exists() else platform.processor()
    return "GenuineIntel" in name and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def _windows(stretch: Stretch, rows: Rows, buffer: np.ndarray) -> Iterator[tuple[list[Run], np.ndarray]]:
    """Runs, and all vectors' entries of them side by side, (K, n), in the dtype of the buffer, which has them."""
    for runs in _cut(stretch.runs, stretch.window):
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            _beside(rows[dtype], start, stop, buffer[:, here])
        yield runs, buffer[:, :at]


def _beside(rows: Sequence[Row], start: int, stop: int, into: np.ndarray) -> None:
    """These entries of all vectors, as the rows of ``into`` (K, n)."""
    done = 0
    if into.size >= LOOP and into.dtype == np.float32 and all(addresses := [row.address for row in rows]):
        from fedfm import passes

        done = into.shape[1] // 16 * 16
        passes.beside(into[:, :done], np.array(addresses), start)
    if start + done < stop:
        for row, x in zip(into[:, done:], rows, strict=True):
            x.copy(start + done, stop, row)


def _blocks(stretch: Stretch, window: np.ndarray) -> Iterator[np.ndarray]:
    """Of so many columns as are multiplied at once, the last one of what is left."""
    for at in range(0, window.shape[1], stretch.block):
        yield window[:, at : at + stretch.block]


class Desk(local):
    """What a thread computes on: one thread's is not seen by another.

    Attributes:
        turn: to be held while computing, for as many threads as may do so at a time.
    """

    def __init__(self, turn: Semaphore) -> None:
        self.turn = turn
        self._buffers: dict[Any, np.ndarray] = {}

    def buffer(self, use: str, stretch: Stretch, count: int) -> np.ndarray:
        """A window of so many vectors; the next stretch has the same, for fresh memory costs more than a copy."""
        if (found := self._buffers.get((use, stretch.dtype))) is None:
            apart = SECTOR // np.dtype(stretch.dtype).itemsize
            row = stretch.window + apart  # rows a power of two apart would share a few lines of a cache
            room = np.empty(count * row + apart, stretch.dtype)
            begin = -room.ctypes.data % SECTOR // room.itemsize
            found = self._buffers[use, stretch.dtype] = room[begin : begin + count * row].reshape(count, row)
        return found


class Row:
    """The flat vector of one dtype, in memory or in a file: of NumPy where it has the dtype.

    Attributes:
        address: of float32 numbers in memory; 0 of others.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat: Any = flat.numpy() if flat.dtype in NATIVE else flat
        self.file = stored(flat)
        self.address = flat.data_ptr() if flat.dtype == torch.float32 and self.file is None else 0

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


def _rows(vectors: Sequence[Params]) -> Rows:
    """Of the floating-point entries, by dtype."""
    dtypes = [d for d in vectors[0].layout.sizes if d.is_floating_point] if vectors else []
    return {d: [Row(x.flats[d]) for x in vectors] for d in dtypes}


def _matrix(rows: Sequence[Row]) -> np.ndarray | None:
    """The vectors as the rows of one matrix, (M, P), where they lie in memory at equal steps."""
    flats = [row.flat for row in rows]
    if not all(isinstance(x, np.ndarray) and row.file is None for x, row in zip(flats, rows, strict=True)):
        return None
    steps = {y.ctypes.data - x.ctypes.data for x, y in itertools.pairwise(flats)} or {flats[0].nbytes}
    if len(steps) > 1 or (step := steps.pop()) < flats[0].nbytes:
        return None
    shape = len(flats), len(flats[0])
    return np.lib.stride_tricks.as_strided(flats[0], shape, (step, flats[0].itemsize))


def _in_files(*several: Rows) -> bool:
    return any(row.file is not None for rows in several for of in rows.values() for row in of)


def _bytes(x: Any) -> np.ndarray:
    return x.view(torch.uint8).numpy() if isinstance(x, Tensor) else x


# --- what is computed where -------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Stretches, how many threads take them, and how many of these compute at a time; the others wait for the disk."""

    stretches: list[Stretch]
    threads: int
    computing: int


def _in_order(function: Callable[[Stretch, Desk], R], plan: Plan) -> Iterator[tuple[Stretch, R]]:
    """Every stretch and what the function makes of it, in their order."""
    stretches, threads, computing = plan
    desk = Desk(Semaphore(computing))

    def quiet(stretch: Stretch) -> R:
        with np.errstate(all="ignore"):  # a vector that is not finite shows in what it gives
            return function(stretch, desk)

    with one_thread(), torch_threads(1):
        if threads <= 1:
            yield from zip(stretches, map(quiet, stretches), strict=True)
        else:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield from zip(stretches, pool.map(quiet, stretches), strict=True)


def _plan(runs: Sequence[Sequence[Run]], count: int, files: bool, wide: Sequence[bool], threads: int | None) -> Plan:
    """Of every layer; float64 entries, and all of a ``wide`` layer's, in float64."""
    block = max(BLOCK, min(MOST, ENTRIES // count // BLOCK * BLOCK))
    long = max(1, STRETCH // block) * block
    cut = [
        (layer, dtype, part)
        for layer, of in enumerate(runs)
        for dtype in (np.float32, np.float64)
        for part in _cut([r for r in of if (wide[layer] or r.dtype == torch.float64) == (dtype is np.float64)], long)
    ]
    work = count * count * sum(r.stop - r.start for of in runs for r in of)
    computing = threads or os.cpu_count() or 1 if work > SHORT else 1
    workers = min(computing + files, len(cut))
    fit = min(PIECE, long, WINDOWS // (max(workers, 1) * 2 * count * 4)) if files else 0
    window = max(1, fit // block) * block
    return Plan([Stretch(*of, block, window) for of in cut], workers, computing)


def _cut(runs: Iterable[Run], size: int) -> Iterator[list[Run]]:
    """Pieces of so many columns, the last one of what is left."""
    piece: list[Run] = []
    free = size
    for dtype, start, stop in runs:
        while start < stop:
            end = min(stop, start + free)
            piece.append(Run(dtype, start, end))
            free, start = free - (end - start), end
            if not free:
                yield piece
                piece, free = [], size
    if piece:
        yield piece


def _merged(layout: Layout, names: Iterable[str], floating: bool = True) -> list[Run]:
    """The entries of these names in as few runs as there are; only the floating-point ones, if so."""
    runs = (Run(*layout.slots[n][:3]) for n in names)
    return _joined(
        sorted(
            (r for r in runs if r.start < r.stop and (r.dtype.is_floating_point or not floating)),
            key=lambda r: (str(r.dtype), r.start),
        )
    )


def _joined(runs: Iterable[Run]) -> list[Run]:
    """Those that follow each other as one."""
    found: list[Run] = []
    for run in runs:
        if found and found[-1].dtype == run.dtype and found[-1].stop == run.start:
            found[-1] = Run(run.dtype, found[-1].start, run.stop)
        else:
            found.append(run)
    return found


def _layout_of(vectors: Sequence[Params]) -> Layout:
    if not vectors:
        raise ValueError("no vectors")
    for x in vectors:
        x.check_like(vectors[0].layout)
    return vectors[0].layout


def _checked(layout: Layout, layers: Sequence[Sequence[str]] | None) -> list[list[str]]:
    if layers is None:
        return [list(layout.slots)]
    seen: set[str] = set()
    for names in layers:
        if missing := [n for n in names if n not in layout.slots]:
            raise KeyError(f"no such parameters: {sorted(missing)[:6]}")
        if twice := [n for n in names if n in seen]:
            raise ValueError(f"in two layers: {sorted(twice)[:6]}")
        seen.update(names)
    return [list(names) for names in layers]
