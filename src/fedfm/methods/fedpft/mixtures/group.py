"""One group: one component in closed form; several by k-means, then EM in ``kernel`` or ``full``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedfm.linalg.kernels.jit import aligned
from fedfm.methods.fedpft.mixtures import full, kernel, kmeans
from fedfm.methods.fedpft.mixtures.full import Found
from fedfm.methods.fedpft.mixtures.mixture import Array
from fedfm.methods.fedpft.mixtures.moments import moments, normal

FLOOR, FLOOR_ALWAYS = 1e-6, 1e-12
LLOYD = 3  # iterations of k-means after k-means++
LARGEST = 1e15  # keeps squares and their sums within float32


@dataclass(frozen=True)
class Started:
    """A group of several components before the first step of EM.

    Attributes:
        x: rows about their mean, (n, d) float32.
        middle: that mean, (1, d).
        labels: of the rows, (n,); each of the ``k`` has a row.
        floor: of the variances.
    """

    x: Array
    middle: Array
    labels: Array
    k: int
    floor: float

    def ended(self, found: Found) -> Found:
        """The result of EM on centred rows, with the mean added."""
        weights, means, scales, *how = found
        return weights, (means + self.middle.astype(np.float64)).astype(np.float32), scales, *how  # type: ignore[return-value]


def begin(group: Array, k: int, covariance: str, seed: int, start: Array | None = None) -> Found | Started:
    """From rows (n, d), in float32: the mixture if it has a closed form, else the start of EM.

    Raises:
        OverflowError: NaN, infinity or numbers beyond 1e15 among the rows.
    """
    n, d = group.shape
    k = min(k, n)
    if group.dtype != np.float32:
        with np.errstate(over="ignore"):  # overflow gives infinity, which is refused
            group = group.astype(np.float32)
    x = np.ascontiguousarray(group).view()  # (n, d)
    x.flags.writeable = False  # one type of array, so the kernel compiles once
    middle, variances = np.empty((1, d), np.float32), np.empty(d)
    if (mean_variance := moments(x, middle[0], variances, LARGEST)) < 0:
        raise OverflowError(f"holds NaN, infinity or numbers beyond {LARGEST:g}")
    floor = FLOOR * mean_variance + FLOOR_ALWAYS
    if k > 1:
        centred = np.subtract(x, middle, out=aligned(n, d))
        labels = kmeans.start(centred, k, seed, LLOYD) if start is None else np.ascontiguousarray(start, np.int64)
        rows = np.bincount(labels)
        if (k := int(np.count_nonzero(rows))) < len(rows):  # drop components without rows
            labels = (np.cumsum(rows > 0) - 1)[labels]
        if k > 1:
            return Started(centred, middle, labels, k, floor)
    if covariance == "full":
        scales = np.zeros((1, d, d), np.float32)
        log_likelihood = full.one(x, middle[0], floor, scales[0])
    else:
        scales = np.empty((1, d) if covariance == "diag" else 1, np.float32)
        log_likelihood = normal(variances, floor, scales.reshape(-1))
    return np.ones(1), middle, scales, log_likelihood, 1, True


def several(s: Started, covariance: str, max_iter: int, tol: float) -> Found:
    """EM for several components."""
    if covariance == "full":
        return s.ended(full.several(s.x, s.labels, s.k, s.floor, max_iter, tol))
    weights, work = np.empty(s.k), aligned(7, s.k, s.x.shape[1])
    work[:] = 0
    diag = covariance == "diag"
    iterations, converged, ll = kernel.em(s.x, s.labels, diag, s.floor, tol, max_iter, weights, work)
    return s.ended((weights, work[0], np.sqrt(work[1] if diag else work[1, :, 0]), ll, iterations, converged))
