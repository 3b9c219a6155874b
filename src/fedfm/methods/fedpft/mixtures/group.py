"""Fit the mixture of one group of rows: one component in closed form; several by k-means, then EM."""

from __future__ import annotations

import math

import numpy as np

from fedfm.linalg.kernels.jit import aligned_empty
from fedfm.methods.fedpft.mixtures import full, kernel, kmeans
from fedfm.methods.fedpft.mixtures.full import Found
from fedfm.methods.fedpft.mixtures.mixture import Array
from fedfm.methods.fedpft.mixtures.moments import moments

FLOOR, FLOOR_ALWAYS = 1e-6, 1e-12
LLOYD = 3  # iterations of k-means after k-means++
LARGEST = 1e15  # keeps squares and their sums within float32


def fit_one(
    group: Array, k: int, covariance: str, seed: int, max_iter: int, tol: float, start: Array | None = None
) -> Found:
    """The mixture of rows (n, d), computed in float32.

    Raises:
        OverflowError: NaN, infinity or numbers beyond 1e15 among the rows.
    """
    n, d = group.shape
    k = min(k, n)
    if group.dtype != np.float32:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is refused
            group = group.astype(np.float32)
    x = np.ascontiguousarray(group).view()  # (n, d)
    x.flags.writeable = False  # numba then sees the same array type for every group, and compiles the kernel once
    middle, variances = np.empty((1, d), np.float32), np.empty(d)
    if (mean_variance := moments(x, middle[0], variances, LARGEST)) < 0:
        raise OverflowError(f"holds NaN, infinity or numbers beyond {LARGEST:g}")
    floor = FLOOR * mean_variance + FLOOR_ALWAYS
    if k > 1:
        centred = np.subtract(x, middle, out=aligned_empty(n, d))
        labels = kmeans.start(centred, k, seed, LLOYD) if start is None else np.ascontiguousarray(start, np.int64)
        rows = np.bincount(labels)
        if (k := int(np.count_nonzero(rows))) < len(rows):  # drop components without rows
            labels = (np.cumsum(rows > 0) - 1)[labels]
        if k > 1:
            weights, means, *rest = _several(centred, labels, k, covariance, floor, max_iter, tol)
            return weights, (means + middle.astype(np.float64)).astype(np.float32), *rest  # type: ignore[return-value]
    if covariance == "full":
        scales = full.factor(np.subtract(x, middle, dtype=np.float64), n, floor)[None]
    else:
        scales = np.sqrt((variances[None] if covariance == "diag" else np.array([mean_variance])) + floor)
    return np.ones(1), middle, scales.astype(np.float32), math.nan, 1, True


def _several(x: Array, labels: Array, k: int, covariance: str, floor: float, max_iter: int, tol: float) -> Found:
    """EM from hard labels (n,), in which each of the k components occurs. The rows ``x`` are centred at their mean."""
    if covariance == "full":
        return full.several(x, labels, k, floor, max_iter, tol)
    weights, work = np.empty(k), aligned_empty(7, k, x.shape[1])
    work[:] = 0
    diag = covariance == "diag"
    iterations, converged, ll = kernel.em(x, labels, diag, floor, tol, max_iter, weights, work)
    return weights, work[0], np.sqrt(work[1] if diag else work[1, :, 0]), ll, iterations, converged
