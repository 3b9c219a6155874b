"""Compiled number-theoretic transforms modulo X^N + 1.

Between the first and the last step, numbers stay unreduced: for primes below 2^46 and N up to 2^15, their magnitudes
stay below 20 q, so that a quotient in float64 is still wrong by at most one. Two steps are computed at a time, so that
the numbers are loaded half as often. The three steps whose pairs are fewer than eight places apart are computed on
transposed blocks, where neighbours in a vector belong to different pairs.

Roots have the shape (N,), in bit-reversed order. :func:`last_roots` arranges those of the last three steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks.modular_kernels import remainder, times
from fedfm.linalg.kernels.jit import compile_cached, part
from fedfm.linalg.kernels.vectors import transpose8

LARGEST = 1 << 46  # primes are below this
_TILE = 128  # number of groups of eight numbers that are transposed at a time
_PLAIN: set[str] = set()
_INT, _FLOAT = np.int64, np.float64


def last_roots(roots: NDArray[np.generic]) -> NDArray[np.generic]:
    """Arrange the roots of the last three steps: (primes, N) -> (primes, 7, N / 8), in the order of their use."""
    n = roots.shape[-1] // 8
    g = np.arange(n)
    places = [n + g, *(2 * n + 2 * g + k for k in range(2)), *(4 * n + 4 * g + k for k in range(4))]
    return np.ascontiguousarray(np.stack([roots[:, at] for at in places], axis=1))


def _apart(u, v, w, ratio, q):  # type: ignore[no-untyped-def]
    """Return u + v w and u - v w."""
    r = times(v, w, ratio, q)
    return u + r, u - r


def _together(u, v, w, ratio, q):  # type: ignore[no-untyped-def]
    """Return u + v and (u - v) w."""
    return u + v, times(u - v, w, ratio, q)


def _near(v, q, inverse):  # type: ignore[no-untyped-def]
    """Reduce v to a magnitude below 1.3 q."""
    return v - _INT(_FLOAT(v) * inverse) * q


def _steps(size):  # type: ignore[no-untyped-def]
    """Return the number of steps before the last three."""
    found = 0
    while size > 8:
        size //= 2
        found += 1
    return found


apart, together, near, steps = (part(f, _PLAIN) for f in (_apart, _together, _near, _steps))


def _forward_row(y, roots, ratios, last, last_ratios, q):  # type: ignore[no-untyped-def]
    """Transform one polynomial (N,) in place."""
    size = y.shape[0]
    inverse = 1.0 / _FLOAT(q)
    gap, blocks = size // 2, 1
    while gap >= 8:
        if gap == size // 2 and steps(size) % 2:
            for block in range(blocks):
                w, p = roots[blocks + block], ratios[blocks + block]
                at = 2 * block * gap
                a, b = y[at : at + gap], y[at + gap : at + 2 * gap]
                for i in range(gap):
                    a[i], b[i] = apart(a[i], b[i], w, p, q)
            gap //= 2
            blocks *= 2
        else:
            half = gap // 2
            for block in range(blocks):
                k, at = blocks + block, 2 * block * gap
                w, p = roots[k], ratios[k]
                w0, p0, w1, p1 = roots[2 * k], ratios[2 * k], roots[2 * k + 1], ratios[2 * k + 1]
                a, b = y[at : at + half], y[at + half : at + gap]
                c, d = y[at + gap : at + gap + half], y[at + gap + half : at + 2 * gap]
                for i in range(half):
                    e, g = apart(a[i], c[i], w, p, q)
                    f, h = apart(b[i], d[i], w, p, q)
                    a[i], b[i] = apart(e, f, w0, p0, q)
                    c[i], d[i] = apart(g, h, w1, p1, q)
            gap //= 4
            blocks *= 4
    scratch = np.empty((8, _TILE), _INT)  # allocated here, so that LLVM knows that it overlaps nothing
    flat = scratch.reshape(-1)
    t0, t1, t2, t3 = scratch[0], scratch[1], scratch[2], scratch[3]
    t4, t5, t6, t7 = scratch[4], scratch[5], scratch[6], scratch[7]
    for at in range(0, size // 8, _TILE):
        for g in range(0, _TILE, 8):
            transpose8(y, 8 * (at + g), 8, flat, g, _TILE)
        end = at + _TILE
        w0, w1, w2, w3 = last[0, at:end], last[1, at:end], last[2, at:end], last[3, at:end]
        w4, w5, w6 = last[4, at:end], last[5, at:end], last[6, at:end]
        p0, p1, p2, p3 = last_ratios[0, at:end], last_ratios[1, at:end], last_ratios[2, at:end], last_ratios[3, at:end]
        p4, p5, p6 = last_ratios[4, at:end], last_ratios[5, at:end], last_ratios[6, at:end]
        for g in range(_TILE):
            a0, a4 = apart(t0[g], t4[g], w0[g], p0[g], q)
            a1, a5 = apart(t1[g], t5[g], w0[g], p0[g], q)
            a2, a6 = apart(t2[g], t6[g], w0[g], p0[g], q)
            a3, a7 = apart(t3[g], t7[g], w0[g], p0[g], q)
            a0, a2 = apart(a0, a2, w1[g], p1[g], q)
            a1, a3 = apart(a1, a3, w1[g], p1[g], q)
            a4, a6 = apart(a4, a6, w2[g], p2[g], q)
            a5, a7 = apart(a5, a7, w2[g], p2[g], q)
            a0, a1 = apart(a0, a1, w3[g], p3[g], q)
            a2, a3 = apart(a2, a3, w4[g], p4[g], q)
            a4, a5 = apart(a4, a5, w5[g], p5[g], q)
            a6, a7 = apart(a6, a7, w6[g], p6[g], q)
            t0[g], t1[g] = remainder(a0, q, inverse), remainder(a1, q, inverse)
            t2[g], t3[g] = remainder(a2, q, inverse), remainder(a3, q, inverse)
            t4[g], t5[g] = remainder(a4, q, inverse), remainder(a5, q, inverse)
            t6[g], t7[g] = remainder(a6, q, inverse), remainder(a7, q, inverse)
        for g in range(0, _TILE, 8):
            transpose8(flat, g, _TILE, y, 8 * (at + g), 8)


def _backward_row(y, roots, ratios, last, last_ratios, shrink, q):  # type: ignore[no-untyped-def]
    """Invert :func:`forward_row`; ``shrink`` is 1 / N modulo q."""
    size = y.shape[0]
    inverse = 1.0 / _FLOAT(q)
    scratch = np.empty((8, _TILE), _INT)  # allocated here, so that LLVM knows that it overlaps nothing
    flat = scratch.reshape(-1)
    t0, t1, t2, t3 = scratch[0], scratch[1], scratch[2], scratch[3]
    t4, t5, t6, t7 = scratch[4], scratch[5], scratch[6], scratch[7]
    for at in range(0, size // 8, _TILE):
        for g in range(0, _TILE, 8):
            transpose8(y, 8 * (at + g), 8, flat, g, _TILE)
        end = at + _TILE
        w0, w1, w2, w3 = last[0, at:end], last[1, at:end], last[2, at:end], last[3, at:end]
        w4, w5, w6 = last[4, at:end], last[5, at:end], last[6, at:end]
        p0, p1, p2, p3 = last_ratios[0, at:end], last_ratios[1, at:end], last_ratios[2, at:end], last_ratios[3, at:end]
        p4, p5, p6 = last_ratios[4, at:end], last_ratios[5, at:end], last_ratios[6, at:end]
        for g in range(_TILE):
            a0, a1 = together(t0[g], t1[g], w3[g], p3[g], q)
            a2, a3 = together(t2[g], t3[g], w4[g], p4[g], q)
            a4, a5 = together(t4[g], t5[g], w5[g], p5[g], q)
            a6, a7 = together(t6[g], t7[g], w6[g], p6[g], q)
            a0, a2 = together(a0, a2, w1[g], p1[g], q)
            a1, a3 = together(a1, a3, w1[g], p1[g], q)
            a4, a6 = together(a4, a6, w2[g], p2[g], q)
            a5, a7 = together(a5, a7, w2[g], p2[g], q)
            a0, t4[g] = together(a0, a4, w0[g], p0[g], q)
            a1, t5[g] = together(a1, a5, w0[g], p0[g], q)
            a2, t6[g] = together(a2, a6, w0[g], p0[g], q)
            a3, t7[g] = together(a3, a7, w0[g], p0[g], q)
            t0[g], t1[g] = near(a0, q, inverse), near(a1, q, inverse)
            t2[g], t3[g] = near(a2, q, inverse), near(a3, q, inverse)
        for g in range(0, _TILE, 8):
            transpose8(flat, g, _TILE, y, 8 * (at + g), 8)
    gap, blocks = 8, size // 16
    while blocks >= 1:
        if blocks == 1:
            w, p = roots[1], ratios[1]
            a, b = y[:gap], y[gap:]
            for i in range(gap):
                a[i], b[i] = together(a[i], b[i], w, p, q)
        else:
            for block in range(blocks // 2):
                k, at = blocks // 2 + block, 4 * block * gap
                w, p = roots[k], ratios[k]
                w0, p0, w1, p1 = roots[2 * k], ratios[2 * k], roots[2 * k + 1], ratios[2 * k + 1]
                a, b = y[at : at + gap], y[at + gap : at + 2 * gap]
                c, d = y[at + 2 * gap : at + 3 * gap], y[at + 3 * gap : at + 4 * gap]
                for i in range(gap):
                    e, f = together(a[i], b[i], w0, p0, q)
                    g, h = together(c[i], d[i], w1, p1, q)
                    e, c[i] = together(e, g, w, p, q)
                    f, d[i] = together(f, h, w, p, q)
                    a[i], b[i] = near(e, q, inverse), near(f, q, inverse)
        gap *= 4
        blocks //= 4
    ratio = _FLOAT(shrink) * inverse
    for i in range(size):
        y[i] = remainder(times(y[i], shrink, ratio, q), q, inverse)


forward_row, backward_row = compile_cached(_forward_row, _PLAIN), compile_cached(_backward_row, _PLAIN)


def _forward(x, roots, ratios, last, last_ratios, primes):  # type: ignore[no-untyped-def]
    """Transform (rows, primes, N) in place; the output is in bit-reversed order."""
    for limb in range(x.shape[1]):
        q = primes[limb]
        for row in range(x.shape[0]):
            forward_row(x[row, limb], roots[limb], ratios[limb], last[limb], last_ratios[limb], q)


def _backward(x, roots, ratios, last, last_ratios, shrink, primes):  # type: ignore[no-untyped-def]
    """Invert :func:`forward`; ``shrink`` is 1 / N modulo each prime."""
    for limb in range(x.shape[1]):
        q, w = primes[limb], shrink[limb]
        for row in range(x.shape[0]):
            backward_row(x[row, limb], roots[limb], ratios[limb], last[limb], last_ratios[limb], w, q)


forward, backward = compile_cached(_forward, _PLAIN), compile_cached(_backward, _PLAIN)
