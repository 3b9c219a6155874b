"""Weighted sums of K long vectors in memory, M at a time: a product whose right matrix is read where its rows lie.

A library's product wants the vectors as one matrix, and copying them side by side takes a quarter of the product's
time: a processor that multiplies does not wait for memory, one that copies does nothing else. Here a panel of columns,
which the second cache holds, is put side by side while tiles are multiplied of the panel before: each asks for a row
or two of the next one. Results leave past the caches, in whole lines.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from fedfm.linalg.kernels.jit import WHOLE_REGISTERS, aligned, compiled, part
from fedfm.linalg.kernels.matmul import FINE, multiplied
from fedfm.linalg.kernels.simd import COUNT, LINE, WORD, intrinsic, line_at, move, pointer, read, sent, write

ROWS, LANES = (8, 3) if WHOLE_REGISTERS else (6, 1)  # of a tile: its sums and a row of the panel stay in registers
WIDTH = LANES * COUNT  # columns of a tile
PANEL = 240 // WIDTH  # tiles that lie beside each other in a panel, at most
ENTRIES = 1 << 17  # of a panel, if that is more than one tile
FETCHED = 2  # rows of the next panel that a tile asks for


@intrinsic
def _tile(
    typing: Any, targets: Any, first: Any, offset: Any, whole: Any, a: Any, p: Any, b: Any, q: Any, n: Any, ahead: Any,
    beside: Any, step: Any,
) -> Any:  # fmt: skip
    """Write sum_k a[p + k ROWS + i] b[q + k WIDTH + ...] to the address targets[first + i] + offset, for ROWS rows i.

    Past the caches with ``whole``, for addresses at which a cache line begins. Memory ``ahead`` and ``beside`` is asked
    for meanwhile, ``step`` / 2^FINE bytes further at each k.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        targets, first, offset, whole, _, _, _, _, n, ahead, beside, step = values
        left, right = (pointer(context, builder, signature.args[i], *values[i : i + 2]) for i in (4, 6))
        sums = multiplied(builder, (ROWS, LANES), left, right, (ROWS, WIDTH), n, (ahead, beside), step)
        begins = []
        for i in range(ROWS):
            target = builder.load(pointer(context, builder, signature.args[0], targets, builder.add(first, WORD(i))))
            begins.append(line_at(builder, builder.add(target, offset)))
        with builder.if_else(whole) as (past, through):
            for way, alignment in ((past, LINE), (through, 4)):
                with way:
                    for begin, of in zip(begins, sums, strict=True):
                        for lane, total in enumerate(of):
                            to = builder.gep(begin, [WORD(lane)])
                            stored = builder.store(builder.load(total), to, align=alignment)
                            if alignment == LINE:
                                once = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
                                stored.set_metadata("nontemporal", once)
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(targets, i8, i8, types.boolean, a, i8, b, i8, i8, i8, i8, i8), generate


@partial(part, maths={"contract"})
def _panel(b: Any, vectors: Any, at: int, beside: int) -> None:
    """Columns from ``at`` on, so many tiles of them, as ``b`` (tiles, K, WIDTH)."""
    count = len(vectors)
    for k in range(count):
        for j in range(beside):
            to, address = (j * count + k) * WIDTH, vectors[k] + 4 * (at + j * WIDTH)
            for lane in range(LANES):
                move(b, to + lane * COUNT, address + lane * LINE)


@partial(compiled, maths={"contract"})
def _mixed(a: Any, b: Any, edge: Any, vectors: Any, targets: Any, n: int, head: int, whole: bool) -> None:
    """Write the sums of n columns; ``whole``: of the targets a cache line begins after ``head`` of them.

    The weights ``a`` are (tiles, K, ROWS), the targets as many as rows of all tiles; ``edge`` has room for a tile.
    """
    count, rows = len(vectors), len(targets)
    wide = len(b) // (count * WIDTH)
    edges = np.array([edge.ctypes.data + 4 * WIDTH * i for i in range(ROWS)])
    at = 0
    while at < n:
        beside = min(wide, (n - at) // WIDTH) if at >= head else 0
        if beside:
            _panel(b, vectors, at, beside)
            following = at + beside * WIDTH
            step = (4 * beside * WIDTH << FINE) // count
            k = 0
            for j in range(beside):
                offset = 4 * (at + j * WIDTH)
                for i in range(0, rows, ROWS):
                    near, far = vectors[min(k, count - 1)], vectors[min(k + 1, count - 1)]
                    k += FETCHED
                    near, far = near + 4 * following, far + 4 * following
                    _tile(targets, i, offset, whole, a, i * count, b, j * count * WIDTH, count, near, far, step)
        else:  # less than a tile: from a copy, by way of one
            following = min(n, head if at < head else at + WIDTH)
            b[: count * WIDTH] = 0
            for k in range(count):
                for c in range(following - at):
                    b[k * WIDTH + c] = read(vectors[k] + 4 * (at + c))
            for i in range(0, rows, ROWS):
                _tile(edges, 0, 0, False, a, i * count, b, 0, count, vectors[0], vectors[0], 0)
                for row in range(ROWS):
                    for c in range(following - at):
                        write(targets[i + row] + 4 * (at + c), edge[row * WIDTH + c])
        at = following
    sent()


def mixed(weights: np.ndarray, vectors: np.ndarray, targets: np.ndarray, n: int) -> None:
    """Target i = sum_k weights[i, k] vector_k, of n float32 numbers each, in memory.

    An entry's sum runs from the first vector to the last, whatever else is computed beside it.

    Args:
        weights: (M, K), float32.
        vectors: (K,) addresses of the first number of each.
        targets: (M,) likewise; none may lie in a vector.
        n: at least 1.
    """
    count, rows = weights.shape[1], -len(weights) % ROWS + len(weights)
    last = np.minimum(np.arange(rows), len(weights) - 1)  # rows that are not there are written twice
    tiles = weights[last].reshape(-1, ROWS, count).transpose(0, 2, 1)
    a = aligned(tiles.size)
    a[:] = tiles.reshape(-1)
    wide = max(1, min(PANEL, ENTRIES // (count * WIDTH)))
    head = int(-targets[0] % LINE) // 4
    whole = not ((targets - targets[0]) % LINE).any() and targets[0] % 4 == 0
    b, edge = aligned(wide * count * WIDTH), aligned(ROWS * WIDTH)
    _mixed(a, b, edge, vectors.astype(np.int64), targets[last].astype(np.int64), n, head if whole else 0, whole)
