"""Local training of one linear head, compiled: all steps of a client in one call, no temporaries but its logits.

Rows are taken four at a time with four classes (logits) or two (gradients), so that a value that was loaded is used
several times; at the edge of a batch the last row stands in for those that are missing, with nothing to add.

Views and scratch are made by the caller: numba needs longer to compile ``reshape`` than a loop over rows. The module
does not import torch, so that a process that only compiles it has done so while another one loads a model.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from fedfm import seeds
from fedfm.compiled import EXACT, compiled, part

F = np.float32  # numba reads a plain 1.0 as float64, and all that it meets becomes float64 too

_part = partial(part, maths=EXACT)


@_part
def _logits(x: Any, rows: Any, w: Any, b: Any, z: Any) -> None:
    """The first rows of ``z`` become x[rows] w^T + b."""
    (classes, d), last = w.shape, len(rows) - 1
    for i0 in range(0, last + 1, 4):
        i1, i2, i3 = min(i0 + 1, last), min(i0 + 2, last), min(i0 + 3, last)
        r0, r1, r2, r3 = rows[i0], rows[i1], rows[i2], rows[i3]
        for c0 in range(0, classes, 4):
            c1, c2, c3 = min(c0 + 1, classes - 1), min(c0 + 2, classes - 1), min(c0 + 3, classes - 1)
            s00, s01, s02, s03 = F(0), F(0), F(0), F(0)
            s10, s11, s12, s13 = F(0), F(0), F(0), F(0)
            s20, s21, s22, s23 = F(0), F(0), F(0), F(0)
            s30, s31, s32, s33 = F(0), F(0), F(0), F(0)
            for j in range(d):
                x0, x1, x2, x3 = x[r0, j], x[r1, j], x[r2, j], x[r3, j]
                w0, w1, w2, w3 = w[c0, j], w[c1, j], w[c2, j], w[c3, j]
                s00, s01, s02, s03 = s00 + x0 * w0, s01 + x0 * w1, s02 + x0 * w2, s03 + x0 * w3
                s10, s11, s12, s13 = s10 + x1 * w0, s11 + x1 * w1, s12 + x1 * w2, s13 + x1 * w3
                s20, s21, s22, s23 = s20 + x2 * w0, s21 + x2 * w1, s22 + x2 * w2, s23 + x2 * w3
                s30, s31, s32, s33 = s30 + x3 * w0, s31 + x3 * w1, s32 + x3 * w2, s33 + x3 * w3
            z[i0, c0], z[i0, c1], z[i0, c2], z[i0, c3] = s00 + b[c0], s01 + b[c1], s02 + b[c2], s03 + b[c3]
            z[i1, c0], z[i1, c1], z[i1, c2], z[i1, c3] = s10 + b[c0], s11 + b[c1], s12 + b[c2], s13 + b[c3]
            z[i2, c0], z[i2, c1], z[i2, c2], z[i2, c3] = s20 + b[c0], s21 + b[c1], s22 + b[c2], s23 + b[c3]
            z[i3, c0], z[i3, c1], z[i3, c2], z[i3, c3] = s30 + b[c0], s31 + b[c1], s32 + b[c2], s33 + b[c3]


@_part
def _add_outer(x: Any, rows: Any, e: Any, w: Any, b: Any) -> None:
    """Add e^T x[rows] to ``w`` and the sum of the first rows of ``e`` to ``b``; behind them stand three of zeros."""
    (classes, d), last = w.shape, len(rows) - 1
    for i in range(0, last + 1, 4):
        r0, r1, r2, r3 = rows[i], rows[min(i + 1, last)], rows[min(i + 2, last)], rows[min(i + 3, last)]
        for c in range(classes):
            b[c] += (e[i, c] + e[i + 1, c]) + (e[i + 2, c] + e[i + 3, c])
        for c0 in range(0, classes, 2):
            odd = c0 + 1 == classes  # then the class before stands in, with nothing to add
            c1, once = max(c0 - 1, 0) if odd else c0 + 1, F(0) if odd else F(1)
            e00, e01, e02, e03 = e[i, c0], e[i + 1, c0], e[i + 2, c0], e[i + 3, c0]
            e10, e11, e12, e13 = once * e[i, c1], once * e[i + 1, c1], once * e[i + 2, c1], once * e[i + 3, c1]
            for j in range(d):
                x0, x1, x2, x3 = x[r0, j], x[r1, j], x[r2, j], x[r3, j]
                w[c0, j] += (e00 * x0 + e01 * x1) + (e02 * x2 + e03 * x3)
                w[c1, j] += (e10 * x0 + e11 * x1) + (e12 * x2 + e13 * x3)


@_part
def _exp(z: Any, count: int, power: Any, bits: Any) -> None:
    """The first entries of ``z``, none above 0, become their exponentials, to 2e-7; in vector lanes, unlike math.exp.

    e^z = 2^q e^t with t = z - q ln 2 in [-ln 2 / 2, ln 2 / 2] (ln 2 in two parts, so that q ln 2 is exact), e^t by the
    polynomial of Cephes' expf, and 2^q by its bits, which are written to ``bits`` and read from ``power``.
    """
    for k in range(count):
        t = F(-87) if z[k] < F(-87) else z[k]
        q = F(np.int32(t * F(1.4426950408889634) - F(0.5)))
        t = (t - q * F(0.693359375)) + q * F(2.12194440e-4)
        p = F(1.9875691500e-4) * t + F(1.3981999507e-3)
        p = p * t + F(8.3334519073e-3)
        p = p * t + F(4.1665795894e-2)
        p = p * t + F(1.6666665459e-1)
        p = p * t + F(5.0000001201e-1)
        z[k] = p * t * t + t + F(1)
        bits[k] = (np.int32(q) + np.int32(127)) << np.int32(23)
    for k in range(count):
        z[k] *= power[k]


@_part
def _errors(z: Any, flat: Any, power: Any, bits: Any, rows: Any, y: Any, classes: int, scale: Any) -> Any:
    """Logits become scale times (softmax - one-hot), the three rows behind them zeros; the mean cross-entropy."""
    m, loss = len(rows), 0.0
    for i in range(m):
        top = z[i, 0]
        for c in range(1, classes):
            top = z[i, c] if z[i, c] > top else top
        for c in range(classes):
            z[i, c] -= top
        loss -= z[i, y[rows[i]]]
    _exp(flat, m * z.shape[1], power, bits)
    for i in range(m):
        total = F(0)
        for c in range(classes):
            total += z[i, c]
        loss += math.log(total)
        share = scale / total
        for c in range(classes):
            z[i, c] *= share
        z[i, y[rows[i]]] -= scale
    for i in range(m, m + 3):
        for c in range(classes):
            z[i, c] = F(0)
    return loss / m


_SCRATCH = "f4[:,::1], f4[::1], f4[::1], i4[::1]"


def scratch(rows: int, width: int) -> tuple[Any, Any, Any, Any]:
    """Room for the logits of so many rows and three more, (rows + 3, width), the same flat, and twice the powers of two
    of :func:`_exp`, as float32 and as bits.
    """
    z, power = np.zeros((rows + 3, width), F), np.empty(rows * width, F)
    return z, z.reshape(-1), power, power.view(np.int32)


@partial(
    compiled,
    maths=EXACT,
    signature=f"f8(f4[:,::1], i8[::1], i8[:,::1], i8, f4[:,::1], f4[::1], f4[:,::1], f4[::1], f8, f8, {_SCRATCH})",
)
def descend(
    x: Any,
    y: Any,
    orders: Any,
    size: int,
    w: Any,
    b: Any,
    to_w: Any,
    to_b: Any,
    eta: float,
    decay: float,
    z: Any,
    flat: Any,
    power: Any,
    bits: Any,
) -> float:
    """Plain SGD on the weights; returns the mean over the steps of the batch's mean cross-entropy.

    Args:
        x, y: rows (n, d) and labels (n,) in 0..C-1.
        orders: (E, m), m > 0, the rows in the order of each epoch.
        size: B, rows a batch.
        w, b: weight (C, d) and bias (C,), not of shared memory.
        to_w, to_b: to which the step -eta (gradient + decay (w, b)) is added: the weights again, or zeros, to get
            the gradient of one batch with eta = -1 and no decay.
        z, flat, power, bits: :func:`scratch` of min(size, m) rows, C wide.
    """
    (classes, d), m, loss, steps = w.shape, orders.shape[1], 0.0, 0
    less = F(-eta * decay)
    for epoch in range(orders.shape[0]):
        for at in range(0, m, size):
            rows = orders[epoch, at : min(at + size, m)]
            _logits(x, rows, w, b, z)
            loss += _errors(z, flat, power, bits, rows, y, classes, F(-eta) / F(len(rows)))
            steps += 1
            if less != F(0):
                for c in range(classes):
                    for j in range(d):
                        to_w[c, j] += less * w[c, j]
                    to_b[c] += less * b[c]
            _add_outer(x, rows, z, to_w, to_b)
    return loss / steps


@partial(
    compiled,
    maths=EXACT,
    signature=f"f8(f4[:,::1], f4[:,::1], f4[:,::1], i8[::1], i8[:,::1], i8, f8, f8, {_SCRATCH})",
)
def descend_in_span(
    first: Any,
    gram: Any,
    a: Any,
    y: Any,
    orders: Any,
    size: int,
    eta: float,
    decay: float,
    z: Any,
    flat: Any,
    power: Any,
    bits: Any,
) -> float:
    """Plain SGD in the span of the rows (see :mod:`fedfm.training.gram`); returns the same as :func:`descend`.

    Args:
        first: X W_0^T + b_0 (n, C).
        gram: X X^T + 1 (n, n).
        a: coefficients (n, C'), zeros, C' >= C; filled.
        y, orders, size: as of :func:`descend`.
        z, flat, power, bits: :func:`scratch` of min(size, n) rows, C' wide.
    """
    (n, classes), width, loss, steps, scale = first.shape, a.shape[1], 0.0, 0, F(1)
    keep = F(1 - eta * decay)
    for epoch in range(orders.shape[0]):
        for at in range(0, n, size):
            rows = orders[epoch, at : min(at + size, n)]
            m, seen = len(rows), n if epoch else at  # others have no coefficients yet
            for i0 in range(0, m, 2):  # what a row m gets is overwritten
                i1, r0, r1 = i0 + 1, rows[i0], rows[min(i0 + 1, m - 1)]
                for c in range(classes):
                    z[i0, c] = scale * first[r0, c]
                    z[i1, c] = scale * first[r1, c]
                for k in range(0, seen, 4):
                    k0, k1 = orders[0, k], orders[0, min(k + 1, seen - 1)]
                    k2, k3 = orders[0, min(k + 2, seen - 1)], orders[0, min(k + 3, seen - 1)]
                    on1, on2, on3 = F(k + 1 < seen), F(k + 2 < seen), F(k + 3 < seen)
                    g00, g01, g02, g03 = gram[r0, k0], on1 * gram[r0, k1], on2 * gram[r0, k2], on3 * gram[r0, k3]
                    g10, g11, g12, g13 = gram[r1, k0], on1 * gram[r1, k1], on2 * gram[r1, k2], on3 * gram[r1, k3]
                    for c in range(width):
                        a0, a1, a2, a3 = a[k0, c], a[k1, c], a[k2, c], a[k3, c]
                        z[i0, c] -= (g00 * a0 + g01 * a1) + (g02 * a2 + g03 * a3)
                        z[i1, c] -= (g10 * a0 + g11 * a1) + (g12 * a2 + g13 * a3)
            loss += _errors(z, flat, power, bits, rows, y, classes, F(eta) / F(len(rows)))
            steps += 1
            if keep != F(1):
                scale *= keep
                for i in range(n):
                    for c in range(width):
                        a[i, c] *= keep
            for i in range(m):
                for c in range(classes):
                    a[rows[i], c] += z[i, c]
    return loss / steps


_U4 = np.uint32


@partial(compiled, maths=set(), signature="void(u8, u4[::1], u4[::1])")
def _state(seed: int, pool: Any, out: Any) -> None:
    """What NumPy's SeedSequence makes of a seed: ``pool`` (4,), its entropy mixed, and ``out`` (8,), PCG64's state."""
    constant = _U4(0x43B0D7E5)
    for i in range(4):
        word = _U4(seed >> np.uint64(32 * i)) if i < 2 else _U4(0)
        word ^= constant
        constant = _U4(constant * _U4(0x931E8875))
        word = _U4(word * constant)
        pool[i] = word ^ (word >> _U4(16))
    for i in range(4):
        for k in range(4):
            if i != k:
                word = pool[i] ^ constant
                constant = _U4(constant * _U4(0x931E8875))
                word = _U4(word * constant)
                word ^= word >> _U4(16)
                word = _U4(_U4(_U4(0xCA01F9DD) * pool[k]) - _U4(_U4(0x4973F715) * word))
                pool[k] = word ^ (word >> _U4(16))
    constant = _U4(0x8B51F9DD)
    for i in range(8):
        word = pool[i % 4] ^ constant
        constant = _U4(constant * _U4(0x58F38DED))
        word = _U4(word * constant)
        out[i] = word ^ (word >> _U4(16))


class _Known(ISeedSequence):
    """A state that is known already."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return self._state


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """:func:`fedfm.seeds.generator`, the same bits: what a client's order of rows costs is mostly the seeding."""
    words = np.empty(12, np.uint32)
    _state(seeds.derive(seed, *purpose), words[:4], words[4:])
    return np.random.Generator(np.random.PCG64(_Known(words[4:].view(np.uint64))))  # type: ignore[arg-type]
