"""Canary clients: evidence that a client took part in noisy sums.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar. One-shot Empirical Privacy Estimation for Federated Learning. ICLR
2024. arXiv:2302.03098, Algorithm 2. A canary sends a random direction with the largest allowed norm, and the attacker
projects the released sums on this direction. Here the attacker also knows what all other clients sent, as differential
privacy assumes. A canary sends its direction equally often with a plus and with a minus sign, so noise that is
common to several releases cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedfm.audits.inference.rates import Array, clopper_pearson
from fedfm.privacy import gaussian

THRESHOLDS = (
    0.5,
    0.8,
    0.95,
)  # fractions of canaries above a threshold; each fraction is tested with a part of the error level
TOO_LONG = 10.0  # a canary's update has this many times the allowed norm, so that the mechanism must clip it


def scores(residuals: Array, signs: Array, directions: Sequence[Array], clip_norm: float) -> Array:
    """Evidence that each canary took part, in standard deviations of the evidence of an absent canary.

    If a direction is drawn independently of a vector x, the projection of x onto it is distributed as N(0, |x|^2 / d).

    Args:
        residuals: (R, d): each release as a sum, minus all that canaries sent to it.
        signs: (K, R): the sign with which each canary sent its direction to a release; 0 if it sent nothing.
        directions: K vectors (d,) of norm 1.
        clip_norm: norm of a canary's update after clipping.

    Returns:
        Evidence (K,); infinite if the releases have no noise.
    """
    own = signs @ residuals  # (K, d)
    shift = clip_norm * (signs != 0).sum(1)
    read = np.array([float(x @ u) for x, u in zip(own, directions, strict=True)]) + shift
    spread = np.linalg.norm(own, axis=1) / math.sqrt(residuals.shape[1])
    # A spread within rounding errors is not noise.
    return np.asarray(np.divide(read, spread, out=np.full(len(own), np.inf), where=spread > 1e-6 * shift))


def epsilon_bound(found: Array, dim: int, delta: float, confidence: float) -> float:
    """The smallest epsilon that is compatible with these scores, if the noise is normal.

    A canary then shifts the score by some mu, so the releases are at best mu-GDP (Dong, Roth, Su. Gaussian Differential
    Privacy. JRSS B 2022). Three estimates share the error level: the mean score; the largest score, since one client
    may have more weight than the others; and the size of the noise, from ``dim`` entries.

    Args:
        found: (K,) scores, each N(mu_k, 1) in units of the measured noise.

    Example:
        >>> few, many = (round(epsilon_bound(np.full(400, 2.0), dim, 1e-5, 0.95), 2) for dim in (100, 10**6))
        >>> few, many, round(gaussian.epsilon_of(1.0, 2.0, 1e-5), 2)
        (7.68, 9.33, 10.0)
    """
    from scipy.stats import norm

    tail = (1 - confidence) / 3
    of_mean = float(found.mean()) - float(norm.isf(tail)) / math.sqrt(len(found))
    mu = max(of_mean, float(found.max()) - float(norm.isf(tail / len(found))))
    return epsilon_at(mu * at_least(dim, tail), delta)


def epsilon_most(found: Array, dim: int, delta: float, confidence: float) -> float:
    """The largest epsilon that is compatible with the mean score; arguments as in :func:`epsilon_bound`."""
    from scipy.stats import chi2, norm

    tail = (1 - confidence) / 2
    mu = float(found.mean()) + float(norm.isf(tail)) / math.sqrt(len(found))
    return epsilon_at(mu * math.sqrt(float(chi2.isf(tail, dim)) / dim), delta)


def epsilon_at(mu: float, delta: float) -> float:
    """The epsilon that mu-GDP gives at this delta; 0 if mu is not positive."""
    return math.inf if mu == math.inf else gaussian.epsilon_of(1.0, mu, delta) if mu > 0 else 0.0


def at_least(numbers: int, tail: float) -> float:
    """Quantile ``tail`` of the ratio of measured to true standard deviation, for ``numbers`` normal values."""
    from scipy.stats import chi2

    return math.sqrt(float(chi2.ppf(tail, numbers)) / numbers)


def counted_bound(found: Array, strangers: Array, delta: float, confidence: float) -> float:
    """A lower bound on epsilon for any noise, from the rates of hits and of false alarms (Clopper and Pearson 1934).

    With m strangers the bound is below ln m. Every second canary serves to choose thresholds. The other canaries, and
    every second stranger, test them.
    """
    here, there = found[1::2], strangers[1::2]
    level = 1 - (1 - confidence) / len(THRESHOLDS)
    best = 0.0
    for share in THRESHOLDS:
        line = np.quantile(found[::2], 1 - share, method="lower")
        hits, alarms = int((here >= line).sum()), int((there >= line).sum())
        rate = clopper_pearson(hits, len(here), level)[0] - delta
        if rate > 0:
            best = max(best, math.log(rate / clopper_pearson(alarms, len(there), level)[1]))
    return best
