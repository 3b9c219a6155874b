"""Measure how well scores separate two sets of rows, with confidence intervals.

The sets are "positives" (rows that were used) and "negatives" (rows that were not). A higher score means "used".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
REPEATS = 2000  # number of repetitions of a bootstrap
FEW = 5  # if a cell (e.g. a client's class) has fewer negatives, the spread of their scores is unknown
NOTABLE, NOTABLE_TPR, ALARMS = (
    0.55,
    0.05,
    0.01,
)  # bounds on AUC and TPR, and the rate of false alarms; guessing has AUC 0.5 and TPR 0.01


def auc(positives: Array, negatives: Array) -> float:
    """Probability that a positive scores above a negative; ties count half (Mann-Whitney).

    Raises:
        ValueError: a set is empty.

    Example:
        >>> auc(np.array([3.0, 1.0]), np.array([0.0, 2.0]))
        0.75
    """
    from scipy.stats import rankdata

    n, m = len(positives), len(negatives)
    if not n or not m:
        raise ValueError(f"{n} positives and {m} negatives: expected at least one of each")
    ranks = rankdata(np.concatenate([positives, negatives]))
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def threshold_at(negatives: Array, share: float) -> float:
    """The lowest threshold above which at most the fraction ``share`` of the negatives lies.

    With fewer than 1/share negatives it is the highest score, so that no negative lies above it.

    Example:
        >>> threshold_at(np.arange(100.0), 0.01), threshold_at(np.arange(10.0), 0.01)
        (98.0, 9.0)
    """
    allowed = int(np.floor(share * len(negatives) + 1e-9))
    return float(np.sort(negatives)[::-1][min(allowed, len(negatives) - 1)])


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact confidence interval of a rate; on each side it errs with probability at most (1 - confidence)/2.

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
    """Percentile interval of a weighted mean of parts, by a bootstrap that draws parts with replacement.

    Rows of one part (one class of one client) share a fit and its noise, so only different parts are independent.
    """
    values, w = np.asarray(parts, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    drawn = rng.integers(0, len(values), (REPEATS, len(values)))  # (repeats, parts)
    means = (values * w)[drawn].sum(1) / w[drawn].sum(1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def mean_interval(figures: Array, reference: Array | None = None) -> tuple[float | None, float | None]:
    """95 % interval of the mean of figures in [0, 1], one for each client; (None, None) for fewer than two clients.

    It uses Student's t, because a bootstrap over few clients gives a too narrow interval.

    Args:
        reference: figures of the same clients without the attack. With a reference, the function computes the interval
            of the differences and adds the mean of the reference. So the result excludes this mean if the interval of
            the differences excludes 0.

    Example:
        >>> low, high = mean_interval(np.array([0.2, 0.4]))
        >>> round(low, 3), round(high, 3), mean_interval(np.array([0.2]))
        (0.0, 1.0, (None, None))
    """
    from scipy.special import stdtrit  # this part of scipy is quick to import

    at = np.zeros(len(figures)) if reference is None else np.asarray(reference, dtype=np.float64)
    apart = np.asarray(figures, dtype=np.float64) - at
    if len(apart) < 2:
        return None, None
    middle = float(at.mean() + apart.mean())
    margin = float(stdtrit(len(apart) - 1, 0.975) * apart.std(ddof=1)) / len(apart) ** 0.5
    return max(middle - margin, 0.0), min(middle + margin, 1.0)


def auc_error(value: float, positives: int, negatives: int) -> float:
    """Standard error of an AUC whose scores are independent.

    Hanley, McNeil: The meaning and use of the area under a receiver operating characteristic curve. Radiology 143,
    1982.
    """
    q1, q2 = value / (2 - value), 2 * value**2 / (1 + value)
    spread = value * (1 - value) + (positives - 1) * (q1 - value**2) + (negatives - 1) * (q2 - value**2)
    return float(np.sqrt(max(spread, 0.0) / (positives * negatives)))


def auc_interval(
    by_cell: Array, weights: Array, negatives: int, rng: np.random.Generator, confidence: float, z: float
) -> tuple[float, float, float]:
    """Mean AUC over cells, and the low and high end of its interval.

    Two intervals are computed, one by a bootstrap over cells and one for independent scores; the wider one is returned.

    Args:
        weights: number of positives in each cell.
        negatives: number of distinct negatives in all cells.
        z: normal quantile for the confidence.
    """
    mean = float(np.average(by_cell, weights=weights))
    low, high = bootstrap(by_cell, weights, rng, confidence)
    margin = z * auc_error(mean, int(weights.sum()), negatives)
    return mean, max(min(low, mean - margin), 0.0), min(max(high, mean + margin), 1.0)


class Rate(NamedTuple):
    """The rate of positives above a threshold, its 95 % interval, and the counts behind it.

    ``hits`` positives and ``alarms`` negatives are above the threshold.
    """

    tpr: float
    low: float
    high: float
    threshold: float
    hits: int
    positives: int
    alarms: int
    negatives: int


def tpr_at(cells: Sequence[tuple[Array, Array]], share: float, rng: np.random.Generator) -> Rate | None:
    """Rate of true positives at a given rate of false positives; None if every cell has fewer than FEW negatives.

    All cells share one threshold. Noisy cells have a larger spread than others, so scores are first divided by the
    spread of the negatives in their cell.

    Args:
        cells: (scores of positives, scores of negatives) of each cell.
        share: largest fraction of negatives above the threshold.
    """
    pairs = []
    for a, b in cells:
        if len(b) >= FEW:
            middle, spread = float(np.median(b)), float(b.std()) or 1.0
            pairs.append(((a - middle) / spread, (b - middle) / spread))
    if not pairs:
        return None
    negatives = np.concatenate([b for _, b in pairs])
    threshold = threshold_at(negatives, share)
    hits, weights = np.array([[int((a > threshold).sum()), len(a)] for a, _ in pairs]).T
    by_cell, exact = bootstrap(hits / weights, weights, rng), clopper_pearson(int(hits.sum()), int(weights.sum()))
    return Rate(
        float(hits.sum() / weights.sum()),
        min(by_cell[0], exact[0]),
        max(by_cell[1], exact[1]),
        threshold,
        int(hits.sum()),
        int(weights.sum()),
        int((negatives > threshold).sum()),
        len(negatives),
    )
