"""Composition of Gaussian releases, with and without Poisson sampling.

Without sampling the composition is exact: releases with noise multipliers z_i equal one release with (sum
1/z_i^2)^(-1/2) (Dong, Roth, Su. Gaussian Differential Privacy. JRSS B 2022, Corollary 3.3). With sampling, privacy loss
distributions are composed, and rounded so that epsilon is an upper bound (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi.
Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions. PoPETs 2022, arXiv:2207.04380; the
library dp_accounting). Noise that is a sum of the clients' shares has a bound in concentrated privacy only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import numpy as np

from fedfm.errors import InputError, MissingExtra
from fedfm.privacy import gaussian

LARGEST = 1e4  # noise multiplier; with more noise a model learns nothing
LITTLE = 0.1  # noise multiplier; with less noise the bound without sampling is used, because the grid takes minutes
WIDTH = 1e-3  # width of the search's last interval, in log z
FINE, COARSE = 1e-4, 1e-3  # steps of the privacy losses' grid: the search for z uses COARSE; both give an upper bound


@dataclass(frozen=True)
class Releases:
    """Equal Gaussian releases about one unit; neighbours differ by one added or removed unit.

    Attributes:
        noise_multiplier: z, standard deviation of the noise over the L2 sensitivity; 0 means no noise.
        times: number of releases.
        rate: q in (0, 1], the probability that a unit is in a release; each unit and release has its own coin.
        concentrated: whether the noise is a sum of shares, so that only rho = 1/(2 z^2) of concentrated privacy is
            proven. A Gaussian of this z would have a smaller epsilon.
    """

    noise_multiplier: float
    times: int = 1
    rate: float = 1.0
    concentrated: bool = False


def epsilon_of(releases: Sequence[Releases], delta: float) -> float:
    """The smallest known upper bound on the epsilon of all releases together; infinite without noise.

    Raises:
        InputError: delta is not in (0, 1).
    """
    if not 0 < delta < 1:
        raise InputError(f"delta = {delta}: expected a number above 0 and below 1")
    spent = tuple(r for r in releases if r.times)
    if any(r.noise_multiplier <= 0 for r in spent):
        return math.inf
    if any(r.concentrated for r in spent):  # releases without sampling have a rho; the epsilon of sampled ones is added
        sampled = [r for r in spent if r.rate < 1]
        rho = sum(r.times / (2 * r.noise_multiplier**2) for r in spent if r.rate == 1)
        return (
            epsilon_of_concentrated(rho, delta / 2) + epsilon_of(sampled, delta / 2)
            if sampled
            else (epsilon_of_concentrated(rho, delta))
        )
    if all(r.rate == 1 for r in spent):
        return _without_sampling(spent, delta) if spent else 0.0
    return _compose(spent, delta, FINE)


def _without_sampling(spent: Sequence[Releases], delta: float) -> float:
    """Epsilon without sampling: exact if all rates are 1, else an upper bound."""
    mu = math.sqrt(sum(r.times / r.noise_multiplier**2 for r in spent))
    return gaussian.epsilon_of(1.0, mu, delta)


def check_library() -> None:
    """Check that the accountant of sampled releases is installed; a run checks it before it starts.

    Raises:
        MissingExtra: it is not.
    """
    if find_spec("dp_accounting") is None:
        raise MissingExtra('[privacy] needs dp-accounting to count epsilon: pip install "fedfm[accounting]"')


@lru_cache(maxsize=256)
def _compose(spent: tuple[Releases, ...], delta: float, interval: float) -> float:
    if min(r.noise_multiplier for r in spent) < LITTLE:
        return _without_sampling(spent, delta)
    check_library()
    import dp_accounting as dp  # takes half a second, and only sampled releases need it
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval)
    for r in spent:
        event = dp.GaussianDpEvent(r.noise_multiplier)
        accountant.compose(event if r.rate == 1 else dp.PoissonSampledDpEvent(r.rate, event), r.times)
    return float(accountant.get_epsilon(delta))


def noise_multiplier_for(epsilon: float, delta: float, times: int = 1, rate: float = 1.0) -> float:
    """The smallest z with which ``times`` releases spend at most ``epsilon``; with sampling, z may be 0.1 % larger.

    Raises:
        InputError: epsilon is not positive, delta is not in (0, 1), or no z below 10,000 is enough.
    """
    if not epsilon > 0:
        raise InputError(f"epsilon = {epsilon}: expected a number above 0")

    def epsilon_at(z: float) -> float:
        releases = Releases(z, times, rate)
        return epsilon_of([releases], delta) if rate == 1 else _compose((releases,), delta, COARSE)

    epsilon_of([], delta)
    z = min(math.sqrt(times) * gaussian.sigma_for(epsilon, delta) * (1 + 1e-9), LARGEST)  # sampling never costs more
    if rate == 1 and epsilon_at(z) <= epsilon:
        return z
    while z < LARGEST and epsilon_at(z) > epsilon:
        z *= 1.01
    if z >= LARGEST:
        raise InputError(f"epsilon = {epsilon:g} needs more noise than {LARGEST:g} times the sensitivity")
    return _smallest(epsilon_at, epsilon, z)


def _smallest(epsilon_at: Callable[[float], float], epsilon: float, z: float) -> float:
    """A noise multiplier at most 0.1 % above the smallest that spends at most ``epsilon``; ``z`` is large enough.

    The computation of one epsilon takes up to seconds, and longer with less noise. So the search interpolates log
    epsilon, which is nearly linear in log z, and starts at large noise.
    """

    def excess(z: float) -> float:
        return max(math.log(max(epsilon_at(z), 1e-300) / epsilon), -20.0)

    high, below = math.log(z), min(excess(z), 0.0)
    low = high + min(0.8 * below, -WIDTH)  # halving the noise at least doubles epsilon, so this seldom goes too far
    while (above := excess(math.exp(low))) <= 0:
        high, below, z = low, above, math.exp(low)
        low = high + min(0.8 * below, -WIDTH)
    stays = 0  # 1: the last step moved the upper end, -1: the lower end
    while high - low > WIDTH:
        root = low + (high - low) * above / (above - below)
        x = root + 0.4 * WIDTH if high - root > root - low else root - 0.4 * WIDTH  # so that the two ends meet
        x = x if low < x < high else (low + high) / 2
        e = excess(math.exp(x))
        if e > 0:  # an end that stays twice counts half (the Illinois rule), so that neither stays for ever
            low, above, below, stays = x, e, below / 2 if stays == -1 else below, -1
        else:
            high, below, above, stays = x, e, above / 2 if stays == 1 else above, 1
            z = math.exp(x)
    return z


def epsilon_of_concentrated(rho: float, delta: float) -> float:
    """The epsilon of rho-zero-concentrated differential privacy, rho = sum 1 / (2 z^2) for Gaussian releases.

    Canonne, Kamath, Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020, arXiv:2004.00010, Corollary
    13: min over alpha > 1 of rho alpha + log(1 / (alpha delta)) / (alpha - 1) + log(1 - 1 / alpha). Every alpha of the
    grid gives an upper bound.
    """
    alpha = 1 + np.logspace(-4, 6, 20_001)
    bounds = rho * alpha + np.log(1 / (alpha * delta)) / (alpha - 1) + np.log1p(-1 / alpha)
    return max(float(bounds.min()), 0.0) if rho else 0.0


def noise_multiplier_for_concentrated(epsilon: float, delta: float, times: int = 1) -> float:
    """The smallest z with which ``times`` releases spend at most ``epsilon`` by :func:`epsilon_of_concentrated`.

    Raises:
        InputError: no z below 10,000 is enough.
    """
    low, high = math.log(1e-4), math.log(LARGEST)
    for _ in range(60):
        middle = (low + high) / 2
        enough = epsilon_of_concentrated(times / (2 * math.exp(2 * middle)), delta) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    if high >= math.log(LARGEST) - 1e-9:
        raise InputError(f"epsilon = {epsilon:g} needs more noise than {LARGEST:g} times the sensitivity")
    return math.exp(high) * (1 + 1e-9)  # the factor covers the rounding of the bound
