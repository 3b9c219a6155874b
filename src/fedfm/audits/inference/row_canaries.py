"""Canary rows: evidence that DP-SGD trained on a row, when each noisy step draws its rows by independent coins.

Andrew, Kairouz, Oh, Oprea, McMahan, Suriyakumar. One-shot Empirical Privacy Estimation for Federated Learning. ICLR
2024. arXiv:2302.03098: many canaries along random directions in one training. Here a canary is a row whose gradient
is its direction, and the attacker sees every step, as DP-SGD's accountant assumes. If a direction is drawn
independently of the steps, the projection of a step onto it is normally distributed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedfm.audits.inference.canaries import at_least, counted_bound, epsilon_at
from fedfm.audits.inference.rates import Array
from fedfm.privacy.composition import Releases, epsilon_of

SURE = 1e-7  # rate of false alarms of the tests in which an alarm counts as proof
LEAST_NOISE = 0.4  # smallest noise multiplier that is tried, since the accountant takes long for smaller ones
_STRANGERS, _NUMBERS = 20_000, 4e7  # number of simulated rows that took no part; largest number of their readings
_STEPS = 100  # largest number of steps of a training whose noise is compared with the noise of other steps


@dataclass(frozen=True)
class Readings:
    """Projections of the trainings' steps onto K canaries' directions.

    Attributes:
        x: (K, T): the projections, in standard deviations of the noise. A projection is distributed as N(``shift``, 1)
            if the canary was in the step, otherwise as N(0, 1).
        shift: C, the bound on a row's gradient, in standard deviations of the noise.
        in_step: (K, T): whether the canary was in the step.
        predicted: (K, T): whether another training of the same rows, with another secret, drew the canary in that step.
        numbers: number of entries of the noise from which the noise's standard deviation is estimated.
    """

    x: Array
    shift: float
    in_step: Array
    predicted: Array
    numbers: int


def together(readings: Sequence[Readings]) -> Readings:
    """Join the canaries of several trainings that have the same number of steps."""
    shift = float(np.mean([r.shift for r in readings]))
    x, in_step, predicted = (
        np.concatenate([getattr(r, name) for r in readings]) for name in ("x", "in_step", "predicted")
    )
    return Readings(x, shift, in_step, predicted, sum(r.numbers for r in readings))


def read(steps: Array, in_step: Array, predicted: Array, directions: Array, clip_norm: float) -> Readings:
    """Project each step onto each canary's direction, after all other canaries were subtracted.

    Args:
        steps: (T, d): noisy sums.
        in_step: (K, T): whether each canary was in each step.
        predicted: (K, T): whether another training drew the canary in the step.
        directions: (K, d): with norm 1.
        clip_norm: C.
    """
    noise = steps - clip_norm * (in_step.T.astype(np.float64) @ directions)
    sigma = math.sqrt(float(np.square(noise).mean()))
    x = directions @ noise.T + clip_norm * in_step
    sigma = max(sigma, 1e-9 * clip_norm)
    return Readings(x / sigma, clip_norm / sigma, in_step, predicted, noise.size)


def epsilon_bound(readings: Readings, claimed: Releases, delta: float, confidence: float) -> float:
    """The smallest epsilon that is compatible with these readings, if the noise is normal.

    Two tests and the estimate of the size of the noise share the error level. The first test assumes secret coins: it
    computes epsilon from an upper confidence bound on the noise multiplier and a lower one on the rate. The second test
    predicts the coins from another training. A canary's score is the sum of its readings in the predicted steps,
    divided by the root of their number. A lower confidence bound on the mean score is taken as mu of a Gaussian
    mechanism without sampling, which gives epsilon.
    """
    tail = (1 - confidence) / 3
    size = at_least(readings.numbers, tail)
    return max(_of_secret_coins(readings, claimed, delta, tail, size), _of_predicted_coins(readings, delta, tail, size))


def estimate(readings: Readings, claimed: Releases, delta: float) -> float:
    """Epsilon for the measured noise and rate, if the noise is normal and the coins are secret."""
    found = readings.x[readings.in_step]
    return _epsilon(float(found.mean()) if len(found) else 0.0, len(found) / readings.in_step.size, claimed, delta)


def _of_secret_coins(readings: Readings, claimed: Releases, delta: float, tail: float, size: float) -> float:
    from scipy.stats import beta, norm

    found = readings.x[readings.in_step]
    if not len(found) or readings.in_step.all():  # if every row is in every step, there are no secret coins
        return 0.0
    mean = float(found.mean()) - float(norm.isf(tail / 2)) / math.sqrt(len(found))
    rate = float(beta.ppf(tail / 2, len(found), readings.in_step.size - len(found) + 1))
    return _epsilon(mean * size, rate, claimed, delta)


def _epsilon(mean: float, rate: float, claimed: Releases, delta: float) -> float:
    if mean <= 0:
        return 0.0
    least = min(claimed.noise_multiplier, max(claimed.noise_multiplier / 2, LEAST_NOISE))
    return epsilon_of([Releases(max(1 / mean, least), claimed.times, rate)], delta)


def _of_predicted_coins(readings: Readings, delta: float, tail: float, size: float) -> float:
    from scipy.stats import norm

    times = readings.predicted.sum(1)
    some = times > 0
    scores = (readings.x * readings.predicted).sum(1)[some] / np.sqrt(times[some])
    if len(scores) < 2:
        return 0.0
    spread = max(float(scores.std(ddof=1)), 1.0)
    mu = float(scores.mean()) - float(norm.isf(tail)) * spread / math.sqrt(len(scores))
    return epsilon_at(mu * size, delta)


def bound_by_counts(
    readings: Readings, rate: float, delta: float, confidence: float, rng: np.random.Generator
) -> float:
    """A lower bound on epsilon for any noise, from counts of hits and of false alarms (see :func:`counted_bound`).

    A score is the log-likelihood of the readings if the row took part, minus that if not. Its coins are unknown.
    """
    steps = readings.x.shape[1]
    strangers = rng.standard_normal((int(min(_STRANGERS, _NUMBERS / steps)), steps))
    found, there = (_ratio(x, readings.shift, rate) for x in (readings.x, strangers))
    return counted_bound(found, there, delta, confidence)


def _ratio(x: Array, shift: float, rate: float) -> Array:
    gain = shift * x - shift * shift / 2
    mixed = gain if rate >= 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + gain)
    return np.asarray(mixed.sum(1))


def coins_differ(trainings: Sequence[Array], rate: float) -> bool:
    """Whether rows enter the steps otherwise than by independent coins of this rate, e.g. in batches of fixed size.

    Args:
        trainings: for each training an array (n, T): whether the row was in the step.
    """
    from scipy.stats import norm

    if rate >= 1:
        return not all(in_step.all() for in_step in trainings)
    numbers, variance = sum(in_step.size for in_step in trainings), rate * (1 - rate)
    away = abs(sum(float(in_step.sum()) for in_step in trainings) - numbers * rate)
    if away > float(norm.isf(SURE / 6)) * math.sqrt(numbers * variance) + 1:
        return True
    n, steps = trainings[0].shape
    rows, sizes = (np.concatenate([in_step.sum(axis) for in_step in trainings]) for axis in (1, 0))
    return _spread_differs(rows, steps, rate) or _spread_differs(sizes, n, rate)


def _spread_differs(sums: Array, trials: int, rate: float) -> bool:
    """Whether the variance of sums of coins differs from the variance of binomial sums, by a chi-squared test."""
    from scipy.stats import chi2

    variance = rate * (1 - rate)
    squares = float(np.square(sums - trials * rate).sum()) / (trials * variance)
    scale = 1 + (1 - 6 * variance) / (2 * trials * variance)
    degrees = len(sums) / scale
    return bool(min(chi2.cdf(squares / scale, degrees), chi2.sf(squares / scale, degrees)) < SURE / 6)


def noise_repeats(noises: Sequence[Array]) -> bool:
    """Whether two steps share noise. The two steps may belong to one training, or to trainings with other secrets.

    Args:
        noises: for each training an array (T, d).
    """
    from scipy.stats import norm

    all_ = np.concatenate([noise[:_STEPS] for noise in noises])
    lengths = np.linalg.norm(all_, axis=1)
    all_ = all_[lengths > 0] / lengths[lengths > 0, None]
    cosines = np.abs(np.triu(all_ @ all_.T, 1))
    pairs = max(len(all_) * (len(all_) - 1) // 2, 1)
    return bool(cosines.max(initial=0.0) * math.sqrt(all_.shape[1]) > norm.isf(SURE / 2 / pairs))
