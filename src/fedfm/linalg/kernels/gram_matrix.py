"""Inner products of all pairs of K long vectors in memory, float32 products of a few hundred entries summed in float64.

A panel of columns of all vectors is turned, so that both factors of a tile are rows of it; tiles on and above the
diagonal are multiplied, and each asks for a row or two of the next panel meanwhile (as
:mod:`fedfm.linalg.kernels.weighted_sums` does).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba.core import types

from fedfm.linalg.kernels.jit import WHOLE_REGISTERS, aligned, compiled
from fedfm.linalg.kernels.matmul import FINE, multiplied
from fedfm.linalg.kernels.simd import COUNT, DOUBLES, WORD, intrinsic, move, pointer, read, turn

ROWS, LANES = (8, 2) if WHOLE_REGISTERS else (4, 1)  # of a tile; rows divide its width
WIDTH = LANES * COUNT
FETCHED = 3  # vectors whose next columns a tile asks for
COLUMNS = 256  # of a panel: what a tile's products are summed over in float32


@intrinsic
def _tile(
    typing: Any, totals: Any, o: Any, under: Any, x: Any, p: Any, q: Any, n: Any, vectors: Any, first: Any, ahead: Any
) -> Any:
    """Add sum_k x[p + k WIDTH + i] x[q + k WIDTH + j] to the float64 entries (i, j), ``under`` apart, at ``o``.

    Meanwhile n numbers of FETCHED vectors from the ``first`` on are asked for, ``ahead`` bytes behind their addresses.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        totals, o, under, x, p, q, n, vectors, first, ahead = values
        left, right = (pointer(context, builder, signature.args[3], x, at) for at in (p, q))
        following = []
        for f in range(FETCHED):
            vector = builder.load(pointer(context, builder, signature.args[7], vectors, builder.add(first, WORD(f))))
            following.append(builder.add(vector, ahead))
        sums = multiplied(builder, (ROWS, LANES), left, right, (WIDTH, WIDTH), n, following, WORD(4 << FINE))
        for i, of in enumerate(sums):
            for lane, total in enumerate(of):
                at = builder.add(o, builder.add(builder.mul(WORD(i), under), WORD(lane * COUNT)))
                to = builder.bitcast(pointer(context, builder, signature.args[0], totals, at), DOUBLES.as_pointer())
                wide = builder.fpext(builder.load(total), DOUBLES)
                builder.store(builder.fadd(builder.load(to, align=8), wide), to, align=8)
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(totals, i8, i8, x, i8, i8, i8, vectors, i8, i8), generate


@partial(compiled, maths={"contract"})
def _squared(totals: Any, x: Any, beside: Any, vectors: Any, near: Any, n: int) -> None:
    """Add the products to ``totals`` (K', K'), K in whole tiles: its part above the diagonal, and some of the rest.

    ``x`` has room for a panel (K' / WIDTH, COLUMNS, WIDTH), ``beside`` for sixteen vectors' rows of it; ``vectors`` are
    FETCHED more than there are.
    """
    count, wide = len(near), len(x) // COLUMNS
    for at in range(0, n, COLUMNS):
        columns = min(COLUMNS, n - at)
        whole, size = columns // COUNT * COUNT, -(-columns // COUNT) * COUNT
        for first in range(0, count, COUNT):
            block = first // WIDTH * COLUMNS * WIDTH + first % WIDTH
            rows = min(COUNT, count - first)
            for i in range(rows):
                address, row = vectors[first + i] + 4 * at, i * COLUMNS
                for j in range(0, whole, COUNT):
                    move(beside, row + j, address + 4 * j)
                for j in range(whole, size):
                    beside[row + j] = read(address + 4 * j) if j < columns else near[first + i]
                if near[first + i] != 0:
                    for j in range(size):
                        beside[row + j] -= near[first + i]
            for j in range(0, size, COUNT):
                turn(x, block + j * WIDTH, WIDTH, beside, j, COLUMNS, rows)
        k, following = 0, 4 * (at + columns)
        for j in range(0, wide, WIDTH):
            for i in range(0, min(j + WIDTH, count), ROWS):
                left = i // WIDTH * COLUMNS * WIDTH + i % WIDTH
                _tile(totals, i * wide + j, wide, x, left, j * COLUMNS, size, vectors, k, following)
                k = min(k + FETCHED, count)


def room(count: int) -> np.ndarray:
    """(K', K') zeros to which :func:`add` adds, K in whole tiles."""
    wide = -(-count // WIDTH) * WIDTH
    return np.zeros((wide, wide))


def add(totals: np.ndarray, vectors: np.ndarray, near: np.ndarray, n: int) -> None:
    """Add the inner products of n float32 numbers of each vector, in memory, less ``near``.

    What is added twice is added to the same bits as at once, if the first numbers are a multiple of COLUMNS.

    Args:
        totals: as :func:`room` gives it.
        vectors: (K,) addresses of the first number of each.
        near: (K,) float32.
        n: at least 1.
    """
    x, beside = aligned(len(totals) * COLUMNS), aligned(COUNT * COLUMNS)
    x[:] = 0  # and zero it stays behind the last vector
    fetched = np.append(vectors, np.full(FETCHED, vectors[-1])).astype(np.int64)
    _squared(totals.reshape(-1), x, beside, fetched, near, n)


def found(totals: np.ndarray, count: int) -> np.ndarray:
    """(K, K), symmetric."""
    above = totals[:count, :count]
    whole: np.ndarray = np.triu(above) + np.triu(above, 1).T
    return whole
