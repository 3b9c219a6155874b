"""Canary clients: evidence that a client took part in noisy sums.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar. One-shot Empirical Privacy Estimation for Federated Learning. ICLR
2024. arXiv:2302.03098, Algorithm 2: a canary sends a random direction of the largest norm allowed, and the attacker
projects the releases onto it. Here it also knows what all others sent, as differential privacy allows. A canary sends
its direction as often with a plus as with a minus, so that noise which releases share cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedfm.audits.inference.rates import Array, clopper_pearson
from fedfm.privacy import gaussian

THRESHOLDS = (0.5, 0.8, 0.95)  # shares of the canaries above a threshold; each is a test with a part of the level
TOO_LONG = 10.0  # what a canary sends has this multiple of the allowed norm: the mechanism must clip it


def scores(residuals: Array, signs: Array, directions: Sequence[Array], clip_norm: float) -> Array:
    """Evidence that each canary took part, in standard deviations of the evidence of an absent canary.

    A direction that was drawn independently of the releases projects them onto N(0, |x|^2 / d), whatever they are.

    Args:
        residuals: (R, d) each release as a sum, less what all canaries sent.
        signs: (K, R) the sign with which each canary sent its direction; 0: it sent nothing.
        directions: K of (d,), of norm 1.
        clip_norm: of what it sent.

    Returns:
        (K,), infinite where the releases have no noise.
    """
    own = signs @ residuals  # (K, d)
    shift = clip_norm * (signs != 0).sum(1)
    read = np.array([float(x @ u) for x, u in zip(own, directions, strict=True)]) + shift
    spread = np.linalg.norm(own, axis=1) / math.sqrt(residuals.shape[1])
    # The rest from rounding is no noise.
    return np.asarray(np.divide(read, spread, out=np.full(len(own), np.inf), where=spread > 1e-6 * shift))


def epsilon_bound(found: Array, dim: int, delta: float, confidence: float) -> float:
    """The smallest epsilon that agrees with these scores, if the noise is normal: a canary shifts it by mu.

    The releases are then mu-GDP at best (Dong, Roth, Su. Gaussian Differential Privacy. JRSS B 2022). Three errors
    share the level: of the mean of the scores, of the largest one, should one client count more than others, and of
    the noise's size, which is known from ``dim`` numbers.

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
    """The largest epsilon that agrees with the mean of these scores; arguments as of :func:`epsilon_bound`."""
    from scipy.stats import chi2, norm

    tail = (1 - confidence) / 2
    mu = float(found.mean()) + float(norm.isf(tail)) / math.sqrt(len(found))
    return epsilon_at(mu * math.sqrt(float(chi2.isf(tail, dim)) / dim), delta)


def epsilon_at(mu: float, delta: float) -> float:
    """Epsilon of mu-GDP; 0 if mu is not positive."""
    return math.inf if mu == math.inf else gaussian.epsilon_of(1.0, mu, delta) if mu > 0 else 0.0


def at_least(numbers: int, tail: float) -> float:
    """Quantile ``tail`` of the measured over the true standard deviation of normal noise, from ``numbers`` values."""
    from scipy.stats import chi2

    return math.sqrt(float(chi2.ppf(tail, numbers)) / numbers)


def counted_bound(found: Array, strangers: Array, delta: float, confidence: float) -> float:
    """The same by rates of hits and of false alarms, for any noise: Clopper and Pearson 1934.

    With m strangers it stays below ln m. A threshold is chosen by the first half of both, and judged by the second.
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
