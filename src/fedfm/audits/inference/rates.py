"""How well an attacker tells two sets of scores apart, with intervals.

The two sets are "positives" (rows that were used) and "negatives" (rows that were not); a higher score says "used".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
REPEATS = 2000  # of a bootstrap


def auc(positives: Array, negatives: Array) -> float:
    """The chance that a positive scores above a negative, ties counting half (Mann-Whitney).

    Raises:
        ValueError: a set is empty.

    Example:
        >>> auc(np.array([3.0, 1.0]), np.array([0.0, 2.0]))
        0.75
    """
    from scipy.stats import rankdata

    n, m = len(positives), len(negatives)
    if not n or not m:
        raise ValueError(f"{n} positives and {m} negatives: neither may be none")
    ranks = rankdata(np.concatenate([positives, negatives]))
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def threshold_at(negatives: Array, share: float) -> float:
    """The lowest score above which no larger share than ``share`` of the negatives lies.

    With fewer than 1/share negatives that is their highest score, and the rate found is 0.

    Example:
        >>> threshold_at(np.arange(100.0), 0.01), threshold_at(np.arange(10.0), 0.01)
        (98.0, 9.0)
    """
    allowed = int(np.floor(share * len(negatives) + 1e-9))
    return float(np.sort(negatives)[::-1][min(allowed, len(negatives) - 1)])


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval of a rate: at most (1 - confidence)/2 on either side.

    Clopper, Pearson: The use of confidence or fiducial limits. Biometrika 26, 1934.

    Example:
        >>> tuple(round(p, 4) for p in clopper_pearson(0, 10))
        (0.0, 0.3085)
    """
    from scipy.stats import beta

    if not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits of {trials} trials")
    tail = (1 - confidence) / 2
    low = float(beta.ppf(tail, hits, trials - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, trials - hits)) if hits < trials else 1.0
    return low, high


def bootstrap(parts: Array, weights: Array, rng: np.random.Generator, confidence: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a weighted mean, drawing whole parts with replacement.

    Rows of one part (one client's class) share a fit and its noise, so that they are no independent trials; parts are.
    """
    values, w = np.asarray(parts, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    drawn = rng.integers(0, len(values), (REPEATS, len(values)))  # (repeats, parts)
    means = (values * w)[drawn].sum(1) / w[drawn].sum(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def auc_error(value: float, positives: int, negatives: int) -> float:
    """Standard error of an AUC of independent scores.

    Hanley, McNeil: The meaning and use of the area under a receiver operating characteristic curve. Radiology 143,
    1982.
    """
    q1, q2 = value / (2 - value), 2 * value**2 / (1 + value)
    spread = value * (1 - value) + (positives - 1) * (q1 - value**2) + (negatives - 1) * (q2 - value**2)
    return float(np.sqrt(max(spread, 0.0) / (positives * negatives)))
