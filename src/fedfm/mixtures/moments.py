"""Mean and variances of a group's rows; Cholesky factors and their inverses."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedfm.compiled import SPAN, compiled, in_order


@in_order
def moments(x: Any, middle: Any, variances: Any, largest: float) -> bool:
    """Fill mean (d,), rounded to float32, and population variances (d,) of the rows ``x`` (n, d), which only are read.

    False, with nothing of use filled in, if there is NaN, infinity or a number beyond ``largest``.
    """
    n, d = x.shape
    s, m = np.empty(d, np.float32), np.empty(d, np.float32)
    for j in range(d):
        middle[j] = variances[j] = 0
        m[j] = x[0, j]  # sums of differences from a row: a large mean costs no digits
    for at in range(0, n, SPAN):
        end = min(at + SPAN, n)
        four = at + (end - at) // 4 * 4
        s[:] = 0
        for i in range(at, four, 4):  # four rows for one pass over the sums
            for j in range(d):
                s[j] += ((x[i, j] - m[j]) + (x[i + 1, j] - m[j])) + ((x[i + 2, j] - m[j]) + (x[i + 3, j] - m[j]))
        for i in range(four, end):
            for j in range(d):
                s[j] += x[i, j] - m[j]
        for j in range(d):
            middle[j] += s[j]
    for j in range(d):
        m[j] += middle[j] / n
        middle[j] = m[j]
    for at in range(0, n, SPAN):
        end = min(at + SPAN, n)
        four = at + (end - at) // 4 * 4
        s[:] = 0
        for i in range(at, four, 4):
            for j in range(d):
                a, b, c, e = x[i, j] - m[j], x[i + 1, j] - m[j], x[i + 2, j] - m[j], x[i + 3, j] - m[j]
                s[j] += (a * a + b * b) + (c * c + e * e)
        for i in range(four, end):
            for j in range(d):
                s[j] += (x[i, j] - m[j]) * (x[i, j] - m[j])
        for j in range(d):
            variances[j] += s[j]
    for j in range(d):
        variances[j] /= n
        if not abs(middle[j]) <= largest or not variances[j] <= largest * largest:
            return False
    return True


@compiled
def factor(s: Any) -> Any:
    """Lower Cholesky factor of a float64 matrix (d, d): LAPACK's, called without Python's lock."""
    return np.linalg.cholesky(s)


@compiled
def invert(lower: Any, v: Any) -> float:
    """Fill the zeros ``v`` (d, d) with the inverse of a lower triangular matrix; its squared Frobenius norm.

    Row i of the inverse V is (e_i - sum_(k<i) L_ik V_k) / L_ii, four k at a time.
    """
    d, total = len(lower), 0.0
    for i in range(d):
        v[i, i] = 1
        four = i // 4 * 4
        for k in range(0, four, 4):
            a, b, c, e = lower[i, k], lower[i, k + 1], lower[i, k + 2], lower[i, k + 3]
            for j in range(k + 4):
                v[i, j] -= (a * v[k, j] + b * v[k + 1, j]) + (c * v[k + 2, j] + e * v[k + 3, j])
        for k in range(four, i):
            a = lower[i, k]
            for j in range(k + 1):
                v[i, j] -= a * v[k, j]
        a = 1 / lower[i, i]
        for j in range(i + 1):
            v[i, j] *= a
            total += v[i, j] * v[i, j]
    return total
