"""EM with full covariances, in float64 with BLAS; groups with fewer rows than dimensions need float64."""

from __future__ import annotations

import math

import numpy as np

from fedfm.methods.fedpft.mixtures.mixture import Array

Found = tuple[Array, Array, Array, float, int, bool]  # weights, means, scales, log-likelihood, E steps, converged

FALL = 1e-10  # relative to the log-likelihood; a smaller decrease is a rounding error
NONE = 1e-10  # a component whose responsibilities sum to less is not updated
FAR = 1e-14  # smaller responsibilities count as 0


def factor(t: Array, n: float, floor: float) -> Array:
    """Lower Cholesky factor of t^T t / n + floor I; ``t`` (m, d) float64."""
    sigma = t.T @ t  # (d, d)
    sigma /= n
    np.einsum("jj->j", sigma)[:] += floor
    # sigma is positive definite: the floor is 1e-6 of the mean variance, and rounding errors are about 1e-16 d.
    lower: Array = np.linalg.cholesky(sigma)
    return lower


def _inverse(lower: Array) -> Array:
    """The inverse of a lower triangular matrix (d, d)."""
    from scipy.linalg.lapack import dtrtri

    return np.asarray(dtrtri(lower, lower=1)[0])


def several(x: Array, labels: Array, k: int, floor: float, max_iter: int, tol: float) -> Found:
    """Fit K components to centred rows ``x`` (n, d), starting from hard labels; each label must have a row."""
    n, d = x.shape
    x = x.astype(np.float64)
    weights, mu, lower, inverse = np.empty(k), np.empty((k, d)), np.empty((k, d, d)), np.empty((k, d, d))
    r = np.zeros((k, n))  # responsibilities
    r[labels, np.arange(n)] = 1
    last, before = -np.inf, (weights, mu, lower)
    for step in range(max_iter + 1):
        if step:
            for c in range(k):
                y = (x - mu[c]) @ inverse[c].T
                log_det = np.log(np.diagonal(lower[c])).sum()
                r[c] = math.log(weights[c]) - log_det - 0.5 * np.einsum("ij,ij->i", y, y)
            top = r.max(0)
            np.exp(r - top, out=r)
            mass = r.sum(0)
            r /= mass
            ll = float((top + np.log(mass)).mean()) - 0.5 * d * math.log(2 * math.pi)
            if ll < last - FALL * (d + abs(last)):
                return *before[:2], before[2].astype(np.float32), last, step, True
            before = weights.copy(), mu.copy(), lower.copy()
        for c in range(k):
            count = r[c].sum()
            weights[c] = max(count, 1e-300) / n
            if count > NONE:
                rows = np.flatnonzero(r[c] > FAR)
                share = r[c, rows, None]
                mu[c] = (share * x[rows]).sum(0) / count
                lower[c] = factor(np.sqrt(share) * (x[rows] - mu[c]), count, floor)
                inverse[c] = _inverse(lower[c])
        if step:
            if abs(ll - last) < tol:
                return weights, mu, lower.astype(np.float32), ll, step, True
            last = ll
    return weights, mu, lower.astype(np.float32), last, max_iter, False
