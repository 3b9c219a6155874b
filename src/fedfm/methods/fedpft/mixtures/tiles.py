"""Covariances of one group's rows, their Cholesky factors, and traces of their inverses, in tiles of 64 x 64.

A tile, and the rows that a product adds to it, stay in the nearest cache. Matrices lie as panels: 64 columns, row after
row, padded by zeros. Everything is sums of A^T B, because the upper factor U of Sigma = P^T P + floor I is made tile by
tile from

    U_JI = U_JJ^-T (sum_r P_rJ^T P_rI - sum_(K<J) U_KJ^T U_KI),

and W = U^-T, of which tr(Sigma^-1) is the squared Frobenius norm, from

    W_IJ = -U_II^-T sum_(J<=K<I) U_KI^T W_KJ,    W_JJ = U_JJ^-T.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import INDEX as _U
from fedfm.linalg.kernels.jit import aligned, compiled, part

T = 64
DEEP = 32  # rows of a product at a time
LANES = 8  # columns at a time


def columns(x: Any, middle: Any) -> Any:
    """Panels P (panels, rows, T) of the columns of (x - middle) / sqrt(n), so that P^T P is the covariance S.

    Of rows ``x`` (n, d) and their mean (d,), float32; the rows of P are a multiple of four.
    """
    n, d = x.shape
    p = _panels(d, -(-n // 4) * 4)
    _fill(x, middle, n**-0.5, p)
    return p


def columns_transposed(x: Any, middle: Any) -> Any:
    """As :func:`columns`, of the transposed matrix: P^T P is (n, n) and has the eigenvalues of S."""
    n, d = x.shape
    p = _panels(n, -(-d // 4) * 4)
    _fill_transposed(x, middle, n**-0.5, p)
    return p


def factor(p: Any, width: int, floor: float) -> tuple[Any, Any, float]:
    """Upper Cholesky factor U of P^T P + floor I, whose ``width`` columns lie in panels P.

    Returns panels of U and of U_JJ^-1, its tiles' inverses, and log det. What lies below U's diagonal is not filled.
    """
    u, v, work = _panels(width, len(p) * T), _panels(width, T), _panels(2 * T, T)
    log_det = _factor(p, width, floor, u, v, work[0].reshape(-1), work[1].reshape(-1))
    return u, v, log_det


def inverse_trace(u: Any, v: Any, width: int) -> float:
    """tr(Sigma^-1) from what :func:`factor` returned."""
    return float(_inverse_trace(u, v, width, _panels(T, u.shape[1])[0], _panels(T, T).reshape(-1)))


def _panels(columns: int, rows: int) -> Any:
    """Room, not filled, for (panels, rows, T) numbers in float64."""
    return aligned(-(-columns // T), rows, T, dtype=np.float64)


@part
def _four(sign: float, a: Any, p: Any, b: Any, q: Any, c: Any, o: Any, first: Any, last: Any) -> None:
    """Four rows of C, from o on, += sign A^T B: A four by four from p on, B four rows from q on.

    Sixteen products for eight numbers read, in columns ``first`` to ``last``, multiples of LANES.
    """
    a00, a01, a02, a03 = sign * a[p], sign * a[p + _U(1)], sign * a[p + _U(2)], sign * a[p + _U(3)]
    p += _U(T)
    a10, a11, a12, a13 = sign * a[p], sign * a[p + _U(1)], sign * a[p + _U(2)], sign * a[p + _U(3)]
    p += _U(T)
    a20, a21, a22, a23 = sign * a[p], sign * a[p + _U(1)], sign * a[p + _U(2)], sign * a[p + _U(3)]
    p += _U(T)
    a30, a31, a32, a33 = sign * a[p], sign * a[p + _U(1)], sign * a[p + _U(2)], sign * a[p + _U(3)]
    for column in range(first, last):
        j = _U(column)
        x, y, z, t = b[q + j], b[q + _U(T) + j], b[q + _U(2 * T) + j], b[q + _U(3 * T) + j]
        c[o + j] += a00 * x + a10 * y + a20 * z + a30 * t
        c[o + _U(T) + j] += a01 * x + a11 * y + a21 * z + a31 * t
        c[o + _U(2 * T) + j] += a02 * x + a12 * y + a22 * z + a32 * t
        c[o + _U(3 * T) + j] += a03 * x + a13 * y + a23 * z + a33 * t


@compiled
def _add(sign: float, a: Any, a0: int, b: Any, b0: int, rows: int, c: Any, c0: int, triangle: bool) -> None:
    """Tile C += sign A^T B over ``rows`` rows, a multiple of four; A, B and C lie in flat panels from rows on.

    ``triangle``: A is an upper triangle, its zeros are left out.
    """
    for at in range(0, rows, DEEP):
        for i in range(0, T, 4):
            for r in range(at, min(at + DEEP, i + 4 if triangle else rows, rows), 4):
                _four(sign, a, _U((a0 + r) * T + i), b, _U((b0 + r) * T), c, _U((c0 + i) * T), 0, T)


@compiled
def _add_square(sign: float, a: Any, rows: int, c: Any) -> None:
    """Tile C += sign A^T A over ``rows`` rows, a multiple of four; what lies left of C's diagonal is not all made."""
    for at in range(0, rows, DEEP):
        for i in range(0, T, 4):
            for r in range(at, min(at + DEEP, rows), 4):
                _four(sign, a, _U(r * T + i), a, _U(r * T), c, _U(i * T), i // LANES * LANES, T)


@compiled
def _add_lower(sign: float, a: Any, a0: int, b: Any, b0: int, c: Any) -> None:
    """Tile C += sign A^T B of tiles A and B, B lower triangular."""
    for i in range(0, T, 4):
        for r in range(0, T, 4):
            _four(sign, a, _U((a0 + r) * T + i), b, _U((b0 + r) * T), c, _U(i * T), 0, r // LANES * LANES + LANES)


@compiled
def _eliminate(u: Any, c: Any, own: bool) -> None:
    """Tile C <- U^-T C from an upper triangle U.

    C is lower triangular; with ``own`` it is U itself, whose upper triangle becomes its Cholesky factor.
    """
    for i in range(0, T, 4):
        first, last = (i // LANES * LANES, T) if own else (0, i // LANES * LANES + LANES)
        for k in range(0, i, 4):
            _four(-1.0, u, _U(k * T + i), c, _U(k * T), c, _U(i * T), first, last)
        for r in range(i, i + 4):
            o = _U(r * T)
            for k in range(i, r):
                a, q = u[_U(k * T + r)], _U(k * T)
                for column in range(first, last):
                    c[o + _U(column)] -= a * c[q + _U(column)]
            a = 1 / (math.sqrt(c[o + _U(r)]) if own else u[o + _U(r)])
            for column in range(first, last):
                c[o + _U(column)] *= a


@compiled
def _factor(p: Any, width: int, floor: float, u: Any, v: Any, c: Any, w: Any) -> float:
    """Fill ``u`` and ``v``, return log det; ``c`` and ``w`` are a tile each. Past ``width`` U is I."""
    many, rows = p.shape[0], p.shape[1]
    log_det = 0.0
    for at in range(many):
        c[:] = 0
        _add_square(1.0, p[at].reshape(-1), rows, c)
        _add_square(-1.0, u[at].reshape(-1), at * T, c)
        for i in range(T):
            c[i * T + i] += floor if at * T + i < width else 1.0
        _eliminate(c, c, True)
        w[:] = 0
        for i in range(T):
            log_det += 2 * math.log(c[i * T + i])
            w[i * T + i] = 1
            for j in range(T):
                u[at, at * T + i, j] = c[i * T + j]
        _eliminate(c, w, False)
        for i in range(T):
            for j in range(T):
                v[at, i, j] = w[j * T + i]
        for to in range(at + 1, many):
            c[:] = 0
            _add(1.0, p[at].reshape(-1), 0, p[to].reshape(-1), 0, rows, c, 0, False)
            _add(-1.0, u[at].reshape(-1), 0, u[to].reshape(-1), 0, at * T, c, 0, False)
            out = u[to].reshape(-1)
            for i in range(at * T * T, (at + 1) * T * T):
                out[i] = 0
            _add(1.0, v[at].reshape(-1), 0, c, 0, T, out, at * T, True)
    return log_det


@compiled
def _inverse_trace(u: Any, v: Any, width: int, w: Any, c: Any) -> float:
    """W's panels one after the other in ``w`` (rows of U, T); ``c`` is a tile."""
    many, total = len(u), 0.0
    flat = w.reshape(-1)
    for at in range(many):
        real = min(T, width - at * T)
        for to in range(at, many):
            for i in range(T):
                for j in range(T):
                    w[to * T + i, j] = v[at, j, i] if to == at else 0.0
            if to > at:
                c[:] = 0
                _add_lower(-1.0, u[to].reshape(-1), at * T, flat, at * T, c)
                _add(-1.0, u[to].reshape(-1), at * T + T, flat, at * T + T, (to - at - 1) * T, c, 0, False)
                _add(1.0, v[to].reshape(-1), 0, c, 0, T, flat, to * T, True)
            for i in range(T):
                for j in range(real):
                    total += w[to * T + i, j] * w[to * T + i, j]
    return total


@compiled
def transpose(u: Any, out: Any) -> None:
    """Fill the zeros ``out`` (d, d), float32, with the lower factor U^T."""
    d = len(out)
    for at in range(0, d, T):
        for j in range(at, d):
            panel, column = j // T, j % T
            for i in range(at, min(at + T, j + 1)):
                out[j, i] = u[panel, i, column]


@compiled
def _fill(x: Any, middle: Any, scale: float, p: Any) -> None:
    """Columns of ``x``, and zeros after them."""
    (n, d), (many, rows, _) = x.shape, p.shape
    for panel in range(many):
        at = panel * T
        real = min(T, d - at)
        for i in range(n):
            for j in range(real):
                p[panel, i, j] = (x[i, at + j] - middle[at + j]) * scale
            for j in range(real, T):
                p[panel, i, j] = 0
        for i in range(n, rows):
            for j in range(T):
                p[panel, i, j] = 0


@compiled
def _fill_transposed(x: Any, middle: Any, scale: float, p: Any) -> None:
    """Rows of ``x``, and zeros after them."""
    (n, d), (many, rows, _) = x.shape, p.shape
    for panel in range(many):
        at = panel * T
        real = min(T, n - at)
        for j in range(rows):
            for i in range(T):
                p[panel, j, i] = (x[at + i, j] - middle[j]) * scale if i < real and j < d else 0.0
