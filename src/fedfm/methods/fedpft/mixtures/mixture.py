"""A Gaussian mixture as a value: g = sum_k pi_k N(mu_k, Sigma_k), equation (2) of FedPFT (arXiv:2402.01862)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

COVARIANCES = ("spherical", "diag", "full")  # at index i, ``scales`` has i + 1 dimensions
ON_SIMPLEX = 1e-3  # largest deviation of the sum of weights from 1
ENTRIES = 1 << 21  # largest product of rows and features for which densities are computed at once: 16 MiB in float64


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of K components in d dimensions. The constructor does not validate it; :meth:`check` does.

    Attributes:
        weights: pi, (K,) float64, on the simplex.
        means: mu, (K, d) float32.
        scales: float32 standard deviations, (K,) or (K, d), or for full covariances lower Cholesky factors (K, d, d).
    """

    weights: Array
    means: Array
    scales: Array

    @property
    def covariance(self) -> str:
        """``"spherical"``, ``"diag"`` or ``"full"``."""
        return COVARIANCES[self.scales.ndim - 1]

    @property
    def components(self) -> int:
        """K."""
        return len(self.weights)

    @property
    def dim(self) -> int:
        """The feature dimension d."""
        return int(self.means.shape[1])

    def sample(self, count: int, rng: np.random.Generator) -> Array:
        """Draw ``count`` rows, (count, d) float32, ordered by component; the components' counts are multinomial."""
        of = rng.multinomial(count, self.weights / self.weights.sum())  # (K,)
        x = rng.standard_normal((count, self.dim), dtype=np.float32)  # (count, d)
        at = 0
        for k, rows in enumerate(of.tolist()):
            part = x[at : at + rows]
            if self.scales.ndim == 3:
                part[:] = part @ self.scales[k].T
            else:
                part *= self.scales[k]
            part += self.means[k]
            at += rows
        return x

    def log_prob(self, x: Array) -> Array:
        """Log-density of the mixture g at every row of ``x`` (n, d), in float64: (n,)."""
        out = np.empty(len(x))
        for at, joint in self._joint(x):
            top = joint.max(0)
            out[at : at + len(top)] = top + np.log(np.exp(joint - top).sum(0))
        return out

    def nearest(self, x: Array) -> Array:
        """The most probable component of each row of ``x`` (n, d): (n,) int64."""
        out = np.empty(len(x), dtype=np.int64)
        for at, joint in self._joint(x):
            out[at : at + joint.shape[1]] = joint.argmax(0)
        return out

    def _joint(self, x: Array) -> Iterator[tuple[int, Array]]:
        """For each block of rows: index of its first row, and log(pi_k times the k-th density) as (K, rows)."""
        x = np.asarray(x)
        if x.ndim != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x has shape {x.shape}, expected (n, {self.dim})")
        with np.errstate(divide="ignore"):
            log_weights = np.log(self.weights)  # a weight of 0 gives -inf
        step = max(1, ENTRIES // self.dim)
        for at in range(0, len(x), step):
            part = x[at : at + step].astype(np.float64)
            yield at, np.stack([log_weights[k] + self._log_normal(k, part) for k in range(self.components)])

    def _log_normal(self, k: int, x: Array) -> Array:
        """Log-density of component k at float64 rows x (n, d): (n,)."""
        scale = self.scales[k].astype(np.float64)
        t = x - self.means[k]  # (n, d)
        if scale.ndim == 2:
            from scipy.linalg import solve_triangular

            t = solve_triangular(scale, t.T, lower=True, overwrite_b=True, check_finite=False).T
            log_det = np.log(np.diagonal(scale)).sum()
        else:
            t /= scale
            log_det = np.log(np.broadcast_to(scale, (self.dim,))).sum()
        return -0.5 * (np.einsum("ij,ij->i", t, t) + self.dim * math.log(2 * math.pi)) - log_det  # type: ignore[no-any-return]

    def check(self) -> None:
        """Refuse an invalid mixture.

        Raises:
            ValueError: inconsistent shapes, NaN or infinity, weights that are not on the simplex to within 1e-3,
                standard deviations (full: the Cholesky factor's diagonal) that are not positive, a Cholesky factor
                that is not lower triangular.
        """
        if self.weights.ndim != 1 or self.means.ndim != 2 or not self.weights.size or not self.means.shape[1]:
            raise ValueError(
                f"weights have shape {self.weights.shape} and means {self.means.shape}, expected (K,) and (K, d)"
            )
        k, d = self.components, self.dim
        if len(self.means) != k:
            raise ValueError(f"{k} weights but {len(self.means)} means")
        if self.scales.shape not in ((k,), (k, d), (k, d, d)):
            raise ValueError(f"scales have shape {self.scales.shape}, expected {(k,)}, {(k, d)} or {(k, d, d)}")
        for name, values in (("weights", self.weights), ("means", self.means), ("scales", self.scales)):
            if not np.isfinite(values).all():
                raise ValueError(f"{name} hold NaN or infinity")
        total = float(self.weights.sum(dtype=np.float64))
        if self.weights.min() < 0 or abs(total - 1) > ON_SIMPLEX:
            raise ValueError(f"weights are not on the simplex: least {self.weights.min():g}, sum {total:g}")
        full = self.scales.ndim == 3
        least = (np.diagonal(self.scales, axis1=1, axis2=2) if full else self.scales).min()
        if not least > 0:
            what = "the Cholesky factors' diagonal" if full else "the standard deviations"
            raise ValueError(f"{what} must be positive, the least is {least:g}")
        if full and np.triu(self.scales, 1).any():
            raise ValueError("the Cholesky factors are not lower triangular")
