"""Self-attention over a packed batch in compiled loops: no grouping by length, no copies of heads, no padding.

The product of one head of one sequence is small (16 x 16 x 32 in a sentence encoder), and libraries spend most of the
time on overhead. Here a tile of eight rows and sixteen columns stays in registers. Queries, keys and values
are read in place; only keys (forward) and values (backward) are transposed first.

The module does not import torch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import EXACT, compile_cached, part
from fedfm.linalg.kernels.matmul import product, transpose
from fedfm.linalg.kernels.simd import COUNT, all_of, exp, first, fma, larger, largest, load, minus, store, times
from fedfm.linalg.kernels.simd import total as sum_of

F = np.float32
_part = partial(part, maths=EXACT)


@_part
def _softmax(p: Any, at: int, rows: int, n: int, wide: int) -> None:
    """Softmax of the first n entries of each row (rows, wide) at ``at``, with zeros after them."""
    for row in range(at, at + rows * wide, wide):
        top = load(p, row)
        if n < COUNT:
            top = first(top, n, F(-np.inf))
        for j in range(COUNT, wide, COUNT):
            top = larger(top, first(load(p, row + j), n - j, F(-np.inf)))
        highest, sums = all_of(largest(top)), all_of(F(0))
        for j in range(0, wide, COUNT):
            e = first(exp(minus(load(p, row + j), highest)), n - j, F(0))
            store(p, row + j, e)
            sums = fma(e, all_of(F(1)), sums)
        share = all_of(F(1) / sum_of(sums))
        for j in range(0, wide, COUNT):
            store(p, row + j, times(load(p, row + j), share))


@_part
def _softmax_backward(d: Any, p: Any, at: int, rows: int, wide: int) -> None:
    """Replace ``d`` = dL/dP (rows, wide) by the gradient of the scores, which is P * (dL/dP - <P, dL/dP>)."""
    for i in range(0, rows * wide, wide):
        sums = all_of(F(0))
        for j in range(0, wide, COUNT):
            sums = fma(load(d, i + j), load(p, at + i + j), sums)
        dot = all_of(sum_of(sums))
        for j in range(0, wide, COUNT):
            store(d, i + j, times(load(p, at + i + j), minus(load(d, i + j), dot)))


@partial(
    compile_cached,
    maths=EXACT,
    signature="void(f4[::1], i8, f4[::1], i8, i8, i8, i8[::1], b1, i8, i8, f4[::1], f4[::1], f4[::1])",
)
def forward(
    q: Any, qs: int, kv: Any, kvs: int, k0: int, v0: int, lengths: Any, single: bool, heads: int, size: int, out: Any,
    p: Any, turned: Any,
) -> None:  # fmt: skip
    """Softmax(q k^T) v for every sequence and head.

    Args:
        q: rows of ``qs`` numbers, which begin with the queries of all heads.
        kv: rows of ``kvs`` numbers: the keys begin at number ``k0``, and the values at ``v0``.
        lengths: (S,) number of rows of each sequence.
        single: whether there is one query for each sequence, and not one for each row.
        out: rows of heads * size numbers, one for each query.
        p: probabilities, kept for the gradient: see :func:`entries`.
        turned: scratch of ``size`` times the padded length of the longest sequence.
    """
    at, start, d = 0, 0, heads * size
    for s in range(len(lengths)):
        n = lengths[s]
        wide, asks, ask = -(-n // COUNT) * COUNT, 1 if single else n, s if single else start
        for h in range(heads):
            transpose(kv, start * kvs + k0 + h * size, kvs, n, wide, size, turned, 0)
            product(p, at, wide, wide, False, q, ask * qs + h * size, qs, 1, asks, turned, 0, wide, size)
            _softmax(p, at, asks, n, wide)
            product(
                out, ask * d + h * size, d, size, False, p, at, wide, 1, asks, kv, start * kvs + v0 + h * size, kvs, n
            )
            at += asks * wide
        start += n


@partial(
    compile_cached,
    maths=EXACT,
    signature="void(f4[::1], f4[::1], i8, f4[::1], i8, i8, i8, i8[::1], b1, i8, i8, f4[::1], f4[::1], f4[::1], "
    "f4[::1], f4[::1])",
)
def backward(
    g: Any, q: Any, qs: int, kv: Any, kvs: int, k0: int, v0: int, lengths: Any, single: bool, heads: int, size: int,
    p: Any, dq: Any, dkv: Any, turned: Any, ds: Any,
) -> None:  # fmt: skip
    """Compute the gradients ``dq`` and ``dkv`` from ``g`` = dL/dout, all laid out as the tensors of :func:`forward`.

    ``ds``: scratch for scores, the number of queries times the padded length of the longest sequence.
    """
    at, start, d = 0, 0, heads * size
    for s in range(len(lengths)):
        n = lengths[s]
        wide, asks, ask = -(-n // COUNT) * COUNT, 1 if single else n, s if single else start
        for h in range(heads):
            query, key, value = ask * qs + h * size, start * kvs + k0 + h * size, start * kvs + v0 + h * size
            transpose(kv, value, kvs, n, wide, size, turned, 0)
            product(ds, 0, wide, wide, False, g, ask * d + h * size, d, 1, asks, turned, 0, wide, size)
            _softmax_backward(ds, p, at, asks, wide)
            product(dq, query, qs, size, False, ds, 0, wide, 1, asks, kv, key, kvs, n)
            product(dkv, key, kvs, size, False, ds, 0, 1, wide, n, q, query, qs, asks)
            product(dkv, value, kvs, size, False, p, at, 1, wide, n, g, ask * d + h * size, d, asks)
            at += asks * wide
        start += n


def round_up(n: Any) -> Any:
    """The length n, rounded up to a multiple of the number of SIMD lanes."""
    return -(-n // COUNT) * COUNT


def entries(lengths: Any, single: bool, heads: int) -> int:
    """Size of ``p``: for each sequence and head, the number of queries times the padded length."""
    wide = round_up(lengths)
    return int((wide if single else wide * lengths).sum()) * heads
