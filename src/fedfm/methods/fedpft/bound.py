"""FedPFT's Theorem 4.2 and Appendix F, corrected: it bounds the loss on real features by the loss on synthetic ones.

The printed bound (9) is loss <= 2 loss~ + sum_i E_c[sqrt(KL_ic / 2)], from Pinsker's inequality. By the definition of
total variation, loss <= loss~ + TV holds without the factor 2, and the sum over clients is weighted by n_i / n. An
empirical distribution has no density, so both bounds are for features smoothed by N(0, w^2 I). Then both densities are
known, and the divergences are means over draws. A nearest-neighbour estimate of the entropy is of no use: in 192
dimensions it gives negative divergences, hence a bound of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfm.methods.fedpft.mixtures import Mixture

DRAWS = 400  # number of draws from each smoothed class
CONFIDENCE = 0.95  # confidence of the corrected bound; its loss and divergences are estimated from draws
_BLOCK = 256  # draws whose distances to all rows are in memory at a time


@dataclass(frozen=True)
class Divergence:
    """The divergences between the smoothed features p of a class and its mixture g."""

    kl: float  # KL(p || g) = E_p[ln p - ln g], nats
    tv: float  # TV(p, g) = E_p[(1 - g / p)_+], in [0, 1]


Counts = Sequence[Sequence[int]]  # by client and class
Cells = Sequence[Sequence[Divergence]]


def divergence(x: np.ndarray, g: Mixture, width: float, rng: np.random.Generator, draws: int = DRAWS) -> Divergence:
    """Estimate the divergences by Monte Carlo: draws from p = (1/n) sum_j N(x_j, width^2 I), for features x (n, d)."""
    x = np.asarray(x, dtype=np.float64)
    z = x[rng.integers(0, len(x), draws)] + width * rng.standard_normal((draws, x.shape[1]))
    difference = _smoothed_log_density(z, x, width) - g.log_prob(z.astype(np.float32))
    return Divergence(float(difference.mean()), float(np.maximum(-np.expm1(-difference), 0.0).mean()))


def _smoothed_log_density(z: np.ndarray, x: np.ndarray, width: float) -> np.ndarray:
    """Log p(z) for points z (m, d), by a numerically stable sum over the rows x (n, d)."""
    from scipy.special import logsumexp

    out = np.empty(len(z))
    constant = np.log(len(x)) + x.shape[1] * np.log(width * np.sqrt(2 * np.pi))
    squares = (x * x).sum(1)
    for start in range(0, len(z), _BLOCK):
        part = z[start : start + _BLOCK]
        distances = np.maximum((part * part).sum(1)[:, None] - 2 * part @ x.T + squares, 0.0)
        out[start : start + _BLOCK] = logsumexp(-distances / (2 * width**2), axis=1) - constant
    return out


@dataclass(frozen=True)
class Bound:
    """Bounds on the head's 0-1 loss on the clients' smoothed training features. ``ours`` holds with 95 % confidence."""

    ours: float  # loss~ + sum_i (n_i/n) sum_c (n_ic/n_i) TV_ic; rows without a mixture count as errors
    printed: float  # 2 loss~ + sum_i mean_c sqrt(KL_ic / 2)
    synthetic_loss: float  # loss~: upper 97.5 % confidence limit of the loss on fresh draws
    vacuous: bool  # ours is not below 1


def bound(errors: int, draws: int, counts: Counts, divergences: Cells, withheld: int = 0) -> Bound:
    """Both bounds, from the head's errors on fresh synthetic draws and the divergences of each client's classes.

    Args:
        counts, divergences: n_ic and the divergences, by client and class.
        withheld: largest possible number of rows in classes that clients did not send.

    Raises:
        ValueError: there are no draws, or no client has a class.
    """
    from scipy.stats import beta

    miss = (1 - CONFIDENCE) / 2  # half of the risk is for the synthetic loss, half for the divergences
    if draws < 1 or not any(map(len, counts)):
        raise ValueError("a bound needs draws and a client with a class")
    limit = 1.0 if errors >= draws else float(beta.ppf(1 - miss, errors + 1, draws - errors))  # Clopper-Pearson
    n = np.concatenate([np.asarray(c, dtype=np.float64) for c in counts])
    # Hoeffding: the estimate of sum_ic (n_ic/n) TV_ic is a weighted mean of DRAWS values in [0, 1] for each client and
    # class.
    margin = math.sqrt(-math.log(miss) * float(((n / n.sum()) ** 2).sum()) / (2 * DRAWS))
    return assemble(limit, counts, divergences, withheld, margin)


def assemble(loss: float, counts: Counts, divergences: Cells, withheld: int = 0, margin: float = 0.0) -> Bound:
    """Both bounds from a synthetic loss; see :func:`bound`. ``margin`` is added to the mean divergence."""
    total = sum(map(sum, counts))
    ours, printed = loss, 2 * loss
    for n, cells in zip(counts, divergences, strict=True):
        pairs = list(zip(n, cells, strict=True))
        ours += sum(n_ic / total * cell.tv for n_ic, cell in pairs)
        printed += sum(n_ic / max(sum(n), 1) * np.sqrt(max(cell.kl, 0.0) / 2) for n_ic, cell in pairs)
    ours += margin
    ours = max(ours, (total * ours + withheld) / (total + withheld))  # fewer withheld rows would give a smaller bound
    return Bound(float(ours), float(printed), loss, bool(ours >= 1))
