"""Self-attention over a packed batch in compiled loops: no gathering by length, no heads laid apart, no padding.

Each product of one sequence's one head is small (16 x 16 x 32 in a sentence encoder), and a library's product of many
such spends most of its time on the way to them. Here a tile of eight rows and sixteen columns stays in registers, read
from where queries, keys and values lie; only keys (forwards) and values (backwards) are turned first.

The module does not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fedfm.compiled import EXACT, compiled, part
from fedfm.lanes import COUNT, all_of, exponential, first, fma, larger, largest, load, minus, spread, store, times, turn
from fedfm.lanes import total as sum_of

ROWS = 8  # of a tile: as many accumulators as have registers everywhere

F = np.float32
_part = partial(part, maths=EXACT)


@_part
def _tile(
    out: Any, o: int, down: int, a: Any, p: int, row: int, step: int, b: Any, q: int, under: int, n: int, rows: int
) -> None:
    """Eight rows ``down`` apart at ``o`` become sum_k a[p + i row + k step] b[q + k under ...]; of missing rows, the
    last takes the place.
    """
    last = rows - 1
    i1, i2, i3, i4 = min(1, last), min(2, last), min(3, last), min(4, last)
    i5, i6, i7 = min(5, last), min(6, last), min(7, last)
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = all_of(F(0))
    p1, p2, p3, p4, p5, p6, p7 = (
        p + i1 * row, p + i2 * row, p + i3 * row, p + i4 * row, p + i5 * row, p + i6 * row, p + i7 * row
    )  # fmt: skip
    for k in range(n):
        y, at = load(b, q + k * under), k * step
        s0, s1 = fma(spread(a, p + at), y, s0), fma(spread(a, p1 + at), y, s1)
        s2, s3 = fma(spread(a, p2 + at), y, s2), fma(spread(a, p3 + at), y, s3)
        s4, s5 = fma(spread(a, p4 + at), y, s4), fma(spread(a, p5 + at), y, s5)
        s6, s7 = fma(spread(a, p6 + at), y, s6), fma(spread(a, p7 + at), y, s7)
    store(out, o, s0)
    store(out, o + i1 * down, s1)
    store(out, o + i2 * down, s2)
    store(out, o + i3 * down, s3)
    store(out, o + i4 * down, s4)
    store(out, o + i5 * down, s5)
    store(out, o + i6 * down, s6)
    store(out, o + i7 * down, s7)


@_part
def _product(
    out: Any, o: int, down: int, width: int, a: Any, p: int, row: int, step: int, rows: int, b: Any, q: int, under: int,
    n: int,
) -> None:  # fmt: skip
    """Rows (rows, width) at ``o`` become the product of (rows, n) at ``p`` and (n, width) at ``q``."""
    for i in range(0, rows, ROWS):
        for j in range(0, width, COUNT):
            _tile(out, o + i * down + j, down, a, p + i * row, row, step, b, q + j, under, n, min(rows - i, ROWS))


@_part
def _turn(x: Any, at: int, under: int, n: int, wide: int, size: int, turned: Any) -> None:
    """The block (n, size) of ``x`` at ``at``, transposed (size, wide), zeros behind its n columns."""
    for c in range(0, size, COUNT):
        for j in range(0, wide, COUNT):
            turn(turned, c * wide + j, wide, x, at + c + j * under, under, n - j)


@_part
def _softmax(p: Any, at: int, rows: int, n: int, wide: int) -> None:
    """Each of the rows (rows, wide) at ``at``: softmax of its first n entries, zeros behind them."""
    for row in range(at, at + rows * wide, wide):
        top = load(p, row)
        if n < COUNT:
            top = first(top, n, F(-np.inf))
        for j in range(COUNT, wide, COUNT):
            top = larger(top, first(load(p, row + j), n - j, F(-np.inf)))
        highest, sums = all_of(largest(top)), all_of(F(0))
        for j in range(0, wide, COUNT):
            e = first(exponential(minus(load(p, row + j), highest)), n - j, F(0))
            store(p, row + j, e)
            sums = fma(e, all_of(F(1)), sums)
        share = all_of(F(1) / sum_of(sums))
        for j in range(0, wide, COUNT):
            store(p, row + j, times(load(p, row + j), share))


@_part
def _softmax_backward(d: Any, p: Any, at: int, rows: int, wide: int) -> None:
    """From dL/dP (rows, wide), ``d``, that in the scores, in its place: P (dL/dP - <P, dL/dP>)."""
    for i in range(0, rows * wide, wide):
        sums = all_of(F(0))
        for j in range(0, wide, COUNT):
            sums = fma(load(d, i + j), load(p, at + i + j), sums)
        dot = all_of(sum_of(sums))
        for j in range(0, wide, COUNT):
            store(d, i + j, times(load(p, at + i + j), minus(load(d, i + j), dot)))


@partial(
    compiled,
    maths=EXACT,
    signature="void(f4[::1], i8, f4[::1], i8, i8, i8, i8[::1], b1, i8, i8, f4[::1], f4[::1], f4[::1])",
)
def forward(
    q: Any, qs: int, kv: Any, kvs: int, k0: int, v0: int, lengths: Any, single: bool, heads: int, size: int, out: Any,
    p: Any, turned: Any,
) -> None:  # fmt: skip
    """Softmax of q k^T, times v, for every sequence and head.

    Args:
        q: rows of ``qs`` numbers, the queries of all heads first.
        kv: rows of ``kvs`` numbers, keys from ``k0`` and values from ``v0`` on.
        lengths: (S,) rows of each sequence.
        single: there is one query a sequence; else as many as rows.
        out: rows of heads * size numbers, one a query.
        p: probabilities, kept for the gradient: see :func:`entries`.
        turned: room for ``size`` times the padded length of the longest sequence.
    """
    at, start, d = 0, 0, heads * size
    for s in range(len(lengths)):
        n = lengths[s]
        wide, asks, ask = -(-n // COUNT) * COUNT, 1 if single else n, s if single else start
        for h in range(heads):
            _turn(kv, start * kvs + k0 + h * size, kvs, n, wide, size, turned)
            _product(p, at, wide, wide, q, ask * qs + h * size, qs, 1, asks, turned, 0, wide, size)
            _softmax(p, at, asks, n, wide)
            _product(out, ask * d + h * size, d, size, p, at, wide, 1, asks, kv, start * kvs + v0 + h * size, kvs, n)
            at += asks * wide
        start += n


@partial(
    compiled,
    maths=EXACT,
    signature="void(f4[::1], f4[::1], i8, f4[::1], i8, i8, i8, i8[::1], b1, i8, i8, f4[::1], f4[::1], f4[::1], "
    "f4[::1], f4[::1])",
)
def backward(
    g: Any, q: Any, qs: int, kv: Any, kvs: int, k0: int, v0: int, lengths: Any, single: bool, heads: int, size: int,
    p: Any, dq: Any, dkv: Any, turned: Any, ds: Any,
) -> None:  # fmt: skip
    """Gradients of what :func:`forward` read, where it read them: ``dq`` as ``q``, ``dkv`` as ``kv``; ``g``, dL/dout,
    as ``out``. ``ds``: room for the queries times the padded length of the longest sequence.
    """
    at, start, d = 0, 0, heads * size
    for s in range(len(lengths)):
        n = lengths[s]
        wide, asks, ask = -(-n // COUNT) * COUNT, 1 if single else n, s if single else start
        for h in range(heads):
            query, key, value = ask * qs + h * size, start * kvs + k0 + h * size, start * kvs + v0 + h * size
            _turn(kv, value, kvs, n, wide, size, turned)
            _product(ds, 0, wide, wide, g, ask * d + h * size, d, 1, asks, turned, 0, wide, size)
            _softmax_backward(ds, p, at, asks, wide)
            _product(dq, query, qs, size, ds, 0, wide, 1, asks, kv, key, kvs, n)
            _product(dkv, key, kvs, size, ds, 0, 1, wide, n, q, query, qs, asks)
            _product(dkv, value, kvs, size, p, at, 1, wide, n, g, ask * d + h * size, d, asks)
            at += asks * wide
        start += n


def padded(n: Any) -> Any:
    """The length n in whole lanes."""
    return -(-n // COUNT) * COUNT


def entries(lengths: Any, single: bool, heads: int) -> int:
    """Numbers in ``p``: of each sequence and head (queries, padded length)."""
    wide = padded(lengths)
    return int((wide if single else wide * lengths).sum()) * heads
