"""Side adapters (:mod:`fedfm.models.adapters.side_adapter`): loss and gradient of a mini-batch in one compiled call.

The products are small, and autograd spends most of a step between them. All scratch is one flat vector; matrices in it
have their columns in whole lanes, with zeros behind the last one. With b_l the states of block l, (P, d) a row:

    z = b_l + h,  a = GELU(z W_d^T),  y = z + alpha a W_u^T,  q = GELU(V_d y),  h <- h + y - z + alpha V_u q.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import EXACT, aligned_empty, compile_cached, compile_part
from fedfm.linalg.kernels.matmul import product
from fedfm.linalg.kernels.simd import COUNT, all_of, exp, fma, load, store, times, total

F = np.float32
EPSILON = F(1e-5)  # of the LayerNorm before the head, as torch's


def lanes(n: int) -> int:
    """The number n rounded up to whole lanes."""
    return -(-n // COUNT) * COUNT


def scratch(rows: int, blocks: int, positions: int, width: int, rank: int, classes: int) -> Any:
    """Scratch of :func:`gradient` for batches of up to so many rows."""
    d, r, c, all_rows = lanes(width), lanes(rank), lanes(classes), rows * positions
    weights = 4 * blocks * d * r + 2 * d * c
    kept = blocks * (2 * all_rows * d + 2 * all_rows * r + 2 * rows * rank * d)
    once = 3 * all_rows * d + all_rows * r + 2 * rows * d + rows * c + rank * d + c * d + r * d
    mixers = 2 * positions * rank * COUNT
    return aligned_empty(weights + kept + once + mixers)


@compile_part
def _gelu(t: Any, x: int, slope: int, e: int, n: int) -> None:
    """Replace n numbers at ``x`` by their GELU and write its derivative to ``slope``; ``e`` is scratch.

    GELU(x) = x Phi(x), with Phi by Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: to 8e-8.
    """
    for i in range(0, n, COUNT):
        v = load(t, x + i)
        store(t, e + i, exp(times(times(v, v), all_of(F(-0.5)))))
    for i in range(n):
        v, tail = t[x + i], t[e + i]
        s = F(1) / (F(1) + F(0.3275911 * math.sqrt(0.5)) * abs(v))
        poly = F(1.061405429) * s + F(-1.453152027)
        poly = poly * s + F(1.421413741)
        poly = poly * s + F(-0.284496736)
        poly = poly * s + F(0.254829592)
        half = F(0.5) * poly * s * tail
        phi = F(1) - half if v > F(0) else half
        t[slope + i] = phi + v * tail * F(0.3989422804014327)
        t[x + i] = v * phi


@compile_part
def _padded(p: Any, at: int, rows: int, columns: int, t: Any, to: int, down: int, turned: bool) -> None:
    """Copy a matrix (rows, columns), or with ``turned`` its transpose, to rows that are ``down`` apart."""
    if turned:
        for j in range(columns):
            for i in range(down):
                t[to + j * down + i] = p[at + i * columns + j] if i < rows else F(0)
    else:
        for i in range(rows):
            for j in range(down):
                t[to + i * down + j] = p[at + i * columns + j] if j < columns else F(0)


@compile_part
def _dot(t: Any, a: int, b: int, n: int) -> Any:
    """The inner product of n numbers, in whole lanes, in float32."""
    sums = all_of(F(0))
    for i in range(0, n, COUNT):
        sums = fma(load(t, a + i), load(t, b + i), sums)
    return total(sums)


@compile_part
def _add_dots(t: Any, to: int, a: int, rows: int, b: int, columns: int, width: int) -> None:
    """Add the lanes of the inner products of ``rows`` and ``columns`` vectors (width,) to (rows, columns, lanes)."""
    for i in range(rows):
        for k in range(columns):
            at = to + (i * columns + k) * COUNT
            sums = load(t, at)
            for j in range(0, width, COUNT):
                sums = fma(load(t, a + i * width + j), load(t, b + k * width + j), sums)
            store(t, at, sums)


@compile_part
def _cross_entropy(t: Any, z: int, y: Any, rows: Any, classes: int, down: int) -> Any:
    """Replace logits (m, classes) by softmax less the label, over m; return the mean cross-entropy."""
    m, loss = len(rows), 0.0
    for i in range(m):
        at = z + i * down
        top, sums = t[at], F(0)
        for c in range(1, classes):
            top = max(top, t[at + c])
        label = at + y[rows[i]]
        mine = top - t[label]
        for c in range(classes):
            t[at + c] = math.exp(t[at + c] - top)
            sums += t[at + c]
        loss += mine + math.log(sums)
        share = F(1) / (sums * F(m))
        for c in range(classes):
            t[at + c] *= share
        t[label] -= F(1) / F(m)
    return loss / m


@partial(
    compile_cached,
    maths=EXACT,
    signature="f8(f4[::1], i8[::1], i8[::1], f4[::1], f4[::1], i8[::1], i8, i8, i8, i8, i8, f4[::1])",
)
def gradient(
    x: Any, y: Any, rows: Any, p: Any, g: Any, at: Any, blocks: int, positions: int, width: int, rank: int,
    classes: int, t: Any,
) -> float:  # fmt: skip
    """The mean cross-entropy of the batch ``rows`` (m,), m > 0; writes its gradient to ``g``.

    Args:
        x, y: states (n, L, P, d), flat, and labels (n,) in 0..C-1.
        p, g: parameters and gradient, flat.
        at: (7,) where W_d, W_u, alpha, V_d, V_u, the head's weight and its bias begin; without mixers V's are unused.
        t: of :func:`scratch`.
    """
    m, mixed = len(rows), positions > 1
    d, r, c, all_rows = -(-width // COUNT) * COUNT, -(-rank // COUNT) * COUNT, -(-classes // COUNT) * COUNT, 0
    all_rows = m * positions
    shape, low, inner = all_rows * d, all_rows * r, m * rank * d if mixed else 0
    at_down, at_up, at_alpha, at_mix_down, at_mix_up, at_head, at_bias = (
        at[0], at[1], at[2], at[3], at[4], at[5], at[6],
    )  # fmt: skip
    matrix = d * r
    weights = 0  # of each block W_d^T (d, r), W_u^T (r, d), W_u (d, r), W_d (r, d)
    head_turned = weights + 4 * blocks * matrix  # (d, c)
    head = head_turned + d * c  # (c, d)
    z0 = head + c * d  # (L, M, d)
    y0 = z0 + blocks * shape  # (L, M, d)
    a0 = y0 + (blocks * shape if mixed else 0)  # (L, M, r)
    da0 = a0 + blocks * low
    b0 = da0 + blocks * low  # (L, m, rank, d)
    db0 = b0 + blocks * inner
    h = db0 + blocks * inner  # (M, d)
    v = h + shape  # (M, d)
    o = v + shape  # (M, d)
    u = o + shape  # (M, r)
    first = u + low  # (m, d), the head's inputs
    spread = first + m * d  # (m, d)
    logits = spread + m * d  # (m, c)
    one = logits + m * c  # (rank, d) or (c, d): a gradient with padding
    mix = one + max(c, r) * d  # (2, P, rank, lanes)
    for level in range(blocks):
        w = weights + 4 * level * matrix
        _padded(p, at_down + level * rank * width, rank, width, t, w, r, True)
        for j in range(width * r, matrix):
            t[w + j] = F(0)
        _padded(p, at_up + level * rank * width, width, rank, t, w + matrix, d, True)
        _padded(p, at_up + level * rank * width, width, rank, t, w + 2 * matrix, r, False)
        for j in range(width * r, matrix):
            t[w + 2 * matrix + j] = F(0)
        _padded(p, at_down + level * rank * width, rank, width, t, w + 3 * matrix, d, False)
    _padded(p, at_head, classes, width, t, head_turned, c, True)
    for j in range(width * c, d * c):
        t[head_turned + j] = F(0)
    _padded(p, at_head, classes, width, t, head, d, False)
    # Forward.
    row_size, block_size = blocks * positions * width, positions * width
    for i in range(m):
        for q in range(positions):
            source, to = rows[i] * row_size + (blocks - 1) * block_size + q * width, h + (i * positions + q) * d
            for j in range(width):
                t[to + j] = x[source + j]
            for j in range(width, d):
                t[to + j] = F(0)
    for level in range(blocks):
        w, alpha = weights + 4 * level * matrix, p[at_alpha + level]
        z, a, da = z0 + level * shape, a0 + level * low, da0 + level * low
        for i in range(m):
            for q in range(positions):
                source, to = rows[i] * row_size + level * block_size + q * width, (i * positions + q) * d
                for j in range(width):
                    t[z + to + j] = x[source + j] + t[h + to + j]
                for j in range(width, d):
                    t[z + to + j] = F(0)
        product(t, a, r, r, False, t, z, d, 1, all_rows, t, w, r, d)
        _gelu(t, a, da, u, low)
        product(t, v, d, d, False, t, a, r, 1, all_rows, t, w + matrix, d, rank)
        for j in range(shape):
            t[v + j] *= alpha
            t[h + j] += t[v + j]
        if mixed:
            yl, b, db = y0 + level * shape, b0 + level * inner, db0 + level * inner
            vd, vu = at_mix_down + level * rank * positions, at_mix_up + level * rank * positions
            for j in range(shape):
                t[yl + j] = t[z + j] + t[v + j]
            for i in range(m):
                here, of = i * positions * d, i * rank * d
                product(t, b + of, d, d, False, p, vd, positions, 1, rank, t, yl + here, d, positions)
                _gelu(t, b + of, db + of, one, rank * d)
                product(t, o + here, d, d, False, p, vu, rank, 1, positions, t, b + of, d, rank)
            for j in range(shape):
                t[h + j] += alpha * t[o + j]
    for i in range(m):
        source, to = h + i * positions * d, i * d
        mean = F(0)
        for j in range(width):
            mean += t[source + j]
        mean /= F(width)
        variance = F(0)
        for j in range(width):
            variance += (t[source + j] - mean) * (t[source + j] - mean)
        spread_i = F(1) / F(math.sqrt(variance / F(width) + EPSILON))
        t[spread + i] = spread_i
        for j in range(width):
            t[first + to + j] = (t[source + j] - mean) * spread_i
        for j in range(width, d):
            t[first + to + j] = F(0)
        for k in range(c):
            t[logits + i * c + k] = p[at_bias + k] if k < classes else F(0)
    product(t, logits, c, c, True, t, first, d, 1, m, t, head_turned, c, d)
    loss = _cross_entropy(t, logits, y, rows, classes, c)
    # Backward: h becomes dL/dh.
    product(t, one, d, d, False, t, logits, 1, c, classes, t, first, d, m)
    for k in range(classes):
        sums = F(0)
        for i in range(m):
            sums += t[logits + i * c + k]
        g[at_bias + k] = sums
        for j in range(width):
            g[at_head + k * width + j] = t[one + k * d + j]
    product(t, v, d, d, False, t, logits, c, 1, m, t, head, d, classes)
    for j in range(shape):
        t[h + j] = F(0)
    for i in range(m):
        source, to, seen = v + i * d, h + i * positions * d, first + i * d
        mean, along = F(0), F(0)
        for j in range(width):
            mean += t[source + j]
            along += t[source + j] * t[seen + j]
        mean /= F(width)
        along /= F(width)
        for j in range(width):
            t[to + j] = (t[source + j] - mean - t[seen + j] * along) * t[spread + i]
    for back in range(blocks):
        level = blocks - 1 - back
        w, alpha = weights + 4 * level * matrix, p[at_alpha + level]
        z, a, da = z0 + level * shape, a0 + level * low, da0 + level * low
        slope = F(0)
        if mixed:
            yl, b, db = y0 + level * shape, b0 + level * inner, db0 + level * inner
            vd, vu = at_mix_down + level * rank * positions, at_mix_up + level * rank * positions
            up_sums, down_sums = mix, mix + positions * rank * COUNT
            for j in range(2 * positions * rank * COUNT):
                t[mix + j] = F(0)
            for i in range(m):
                here, of = i * positions * d, i * rank * d
                product(t, one, d, d, False, p, vu, 1, rank, rank, t, h + here, d, positions)  # V_u^T dh
                slope += _dot(t, one, b + of, rank * d)
                for j in range(rank * d):
                    t[one + j] *= alpha * t[db + of + j]
                _add_dots(t, up_sums, h + here, positions, b + of, rank, d)
                _add_dots(t, down_sums, one, rank, yl + here, positions, d)
                product(t, o + here, d, d, False, p, vd, 1, positions, positions, t, one, d, rank)  # V_d^T dq
            for k in range(positions * rank):
                ups, downs = F(0), F(0)
                for j in range(COUNT):
                    ups += t[up_sums + k * COUNT + j]
                    downs += t[down_sums + k * COUNT + j]
                g[vu + k] = alpha * ups
                g[vd + k] = downs
            for j in range(shape):
                t[h + j] += t[o + j]
        product(t, u, r, r, False, t, h, d, 1, all_rows, t, w + 2 * matrix, r, d)  # dh W_u
        g[at_alpha + level] = slope + _dot(t, u, a, low)
        product(t, one, d, d, False, t, a, 1, r, rank, t, h, d, all_rows)
        for k in range(rank):
            for j in range(width):
                g[at_up + (level * width + j) * rank + k] = alpha * t[one + k * d + j]
        for j in range(low):
            t[u + j] *= alpha * t[da + j]
        product(t, one, d, d, False, t, u, 1, r, rank, t, z, d, all_rows)
        for k in range(rank):
            for j in range(width):
                g[at_down + (level * rank + k) * width + j] = t[one + k * d + j]
        if level:
            product(t, h, d, d, True, t, u, r, 1, all_rows, t, w + 3 * matrix, d, rank)
    return float(loss)
