"""One group's mixture: a closed form for one component; several run in ``kernel`` (spherical, diag) or ``full``."""

from __future__ import annotations

import numpy as np

from fedfm.mixtures import full, kernel, kmeans
from fedfm.mixtures.compiled import aligned
from fedfm.mixtures.full import Found
from fedfm.mixtures.mixture import Array
from fedfm.mixtures.moments import moments, normal

FLOOR, FLOOR_ALWAYS = 1e-6, 1e-12
LLOYD = 3  # iterations of k-means after k-means++
LARGEST = 1e15  # squares and their sums stay far inside float32


def fit(
    group: Array, k: int, covariance: str, seed: int, max_iter: int, tol: float, start: Array | None = None
) -> Found:
    """Of rows (n, d), in float32 about their mean; the arguments are those of :func:`fedfm.mixtures.fit`.

    Raises:
        OverflowError: NaN, infinity or numbers beyond 1e15 among the rows.
    """
    n, d = group.shape
    k = min(k, n)
    if group.dtype != np.float32:
        with np.errstate(over="ignore"):  # to infinity, which is refused
            group = group.astype(np.float32)
    x = np.ascontiguousarray(group).view()  # (n, d)
    x.flags.writeable = False  # of one type, whatever it was: compiled once
    middle, variances = np.empty((1, d), np.float32), np.empty(d)
    if (mean_variance := moments(x, middle[0], variances, LARGEST)) < 0:
        raise OverflowError(f"holds NaN, infinity or numbers beyond {LARGEST:g}")
    floor = FLOOR * mean_variance + FLOOR_ALWAYS
    if k > 1:
        x = np.subtract(x, middle, out=aligned(n, d))
        labels = kmeans.start(x, k, seed, LLOYD) if start is None else np.ascontiguousarray(start, np.int64)
        rows = np.bincount(labels)
        k = int(np.count_nonzero(rows))
        if k < len(rows):  # a component without rows is none
            labels = (np.cumsum(rows > 0) - 1)[labels]
        if covariance == "full":
            weights, means, scales, *how = full.several(x, labels, k, floor, max_iter, tol)
        else:
            weights, means, scales, *how = _several(x, labels, k, covariance == "diag", floor, max_iter, tol)
        return weights, (means + middle.astype(np.float64)).astype(np.float32), scales, *how  # type: ignore[return-value]
    if covariance == "full":
        scales = np.zeros((1, d, d), np.float32)
        log_likelihood = full.one(x, middle[0], floor, scales[0])
    else:
        scales = np.empty((1, d) if covariance == "diag" else 1, np.float32)
        log_likelihood = normal(variances, floor, scales.reshape(-1))
    return np.ones(1), middle, scales, log_likelihood, 1, True


def _several(x: Array, labels: Array, k: int, diag: bool, floor: float, max_iter: int, tol: float) -> Found:
    """K components at centred rows (n, d) from labels that each have a row; spherical or diagonal covariances."""
    weights, work = np.empty(k), aligned(7, k, x.shape[1])
    work[:] = 0
    iterations, converged, ll = kernel.em(x, labels, diag, floor, tol, max_iter, weights, work)
    return weights, work[0], np.sqrt(work[1] if diag else work[1, :, 0]), ll, iterations, converged
