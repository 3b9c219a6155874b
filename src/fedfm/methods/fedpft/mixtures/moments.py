"""Mean and variances of a group's rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import SPAN, compile_cached


@partial(compile_cached, maths={"contract"})  # other options would reorder sums or ignore NaN
def moments(x: Any, middle: Any, variances: Any, largest: float) -> float:
    """Compute the mean and the population variances of rows ``x`` (n, d).

    The mean is written into ``middle`` (d,), float32, and the variances into ``variances`` (d,), float64.

    Returns the mean variance, or -1 if there is NaN, infinity or a number beyond ``largest``; then the outputs are
    undefined.
    """
    n, d = x.shape
    s, total = np.empty(d, np.float32), 0.0
    for j in range(d):
        variances[j] = 0
        middle[j] = x[0, j]  # sum differences from the first row, so that a large mean costs no digits
    for at in range(0, n, SPAN):
        end = min(at + SPAN, n)
        four = at + (end - at) // 4 * 4
        s[:] = 0
        for i in range(at, four, 4):  # add four rows in one pass over the sums
            for j in range(d):
                m = middle[j]
                s[j] += ((x[i, j] - m) + (x[i + 1, j] - m)) + ((x[i + 2, j] - m) + (x[i + 3, j] - m))
        for i in range(four, end):
            for j in range(d):
                s[j] += x[i, j] - middle[j]
        for j in range(d):
            variances[j] += s[j]
    for j in range(d):
        middle[j] += variances[j] / n
        variances[j] = 0
    for at in range(0, n, SPAN):
        end = min(at + SPAN, n)
        four = at + (end - at) // 4 * 4
        s[:] = 0
        for i in range(at, four, 4):
            for j in range(d):
                m = middle[j]
                a, b, c, e = x[i, j] - m, x[i + 1, j] - m, x[i + 2, j] - m, x[i + 3, j] - m
                s[j] += (a * a + b * b) + (c * c + e * e)
        for i in range(four, end):
            for j in range(d):
                s[j] += (x[i, j] - middle[j]) * (x[i, j] - middle[j])
        for j in range(d):
            variances[j] += s[j]
    for j in range(d):
        variances[j] /= n
        if not abs(middle[j]) <= largest or not variances[j] <= largest * largest:
            return -1.0
        total += variances[j]
    return float(total / d)
