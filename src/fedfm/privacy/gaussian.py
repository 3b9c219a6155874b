"""The Gaussian mechanism, calibrated exactly.

Balle, Wang: Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising.
ICML 2018. arXiv:1805.06530, Theorem 8 and Algorithm 1. The noise of FedPFT (Beitollahi et al. 2024, Theorem 4.1) is
here too, with a check of what it is worth.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from fedfm.errors import InputError

_SLACK = 1 + 1e-12  # on sigma and epsilon: covers the rounding of delta_of, so that what is promised holds in floats


def delta_of(sigma: float, sensitivity: float, epsilon: float) -> float:
    """The smallest delta for which noise N(0, sigma^2 I) is (epsilon, delta)-private: Balle & Wang 2018, Theorem 8.

    Phi(s/(2 sigma) - epsilon sigma/s) - e^epsilon Phi(-s/(2 sigma) - epsilon sigma/s), s = ``sensitivity``.

    Args:
        sigma: standard deviation of the noise of each number; 0 is no noise.
        sensitivity: the largest L2 distance between the statistics of two neighbouring data sets.
        epsilon: at least 0.

    Raises:
        InputError: an argument is negative or NaN, or sigma or the sensitivity is infinite.

    Example:
        >>> round(delta_of(3.730632, 1.0, 1.0), 9)
        1e-05
    """
    _finite("sigma", sigma, least=0.0)
    _finite("sensitivity", sensitivity, least=0.0)
    if not epsilon >= 0:
        raise InputError(f"epsilon is {epsilon}; it must be a number of at least 0")
    if sensitivity == 0:
        return 0.0  # the two data sets cannot be told apart
    if epsilon == math.inf:
        return 0.0
    if sigma == 0 or sensitivity / sigma == math.inf:
        return 1.0
    from scipy.special import erfcx, ndtr

    half, shift = 0.5 * sensitivity / sigma, epsilon * (sigma / sensitivity)
    low, high = shift - half, shift + half
    if abs(low) > 1e150:
        return 1.0 if low < 0 else 0.0
    # e^epsilon phi(high) = phi(low), so that e^epsilon, which overflows, is not needed. With Mills' ratio M,
    # delta = phi(low) (M(low) - M(high)).
    scale = 0.5 * math.exp(-0.5 * low * low)
    if high - low < 0.5:  # the difference would cancel: integrate -M'(u) = 1 - u M(u)
        nodes, weights = _quadrature()
        u = low + half * (nodes + 1)
        slope = math.sqrt(2 / math.pi) - u * erfcx(u / math.sqrt(2))
        return max(scale * half * float(weights @ slope), 0.0)
    if low < 0:  # here delta is not small, and M(low) may overflow
        return max(float(ndtr(-low)) - scale * float(erfcx(high / math.sqrt(2))), 0.0)
    return max(scale * float(erfcx(low / math.sqrt(2)) - erfcx(high / math.sqrt(2))), 0.0)


@functools.lru_cache(maxsize=1)
def _quadrature() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gauss-Legendre on [-1, 1]: exact to rounding for so smooth a function on so short an interval."""
    nodes, weights = np.polynomial.legendre.leggauss(12)
    return nodes, weights


def sigma_for(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest noise that is (epsilon, delta)-private: Balle & Wang 2018, Algorithm 1, by bisection.

    Args:
        epsilon: above 0.
        delta: between 0 and 1, both excluded.
        sensitivity: the result is proportional to it.

    Raises:
        InputError: epsilon is not a positive number, delta is not in (0, 1), or the sensitivity is negative.

    Example:
        >>> round(sigma_for(1.0, 1e-5), 6)
        3.730632
    """
    _target(epsilon, delta)
    _finite("sensitivity", sensitivity, least=0.0)
    return sensitivity * _unit_sigma(epsilon, delta)


@functools.lru_cache(maxsize=64)
def _unit_sigma(epsilon: float, delta: float) -> float:
    """For sensitivity 1: delta_of falls as sigma grows."""
    low = high = 1.0
    while delta_of(low, 1.0, epsilon) <= delta:
        low /= 2
    while delta_of(high, 1.0, epsilon) > delta:
        high *= 2
    while low < (middle := 0.5 * (low + high)) < high:
        if delta_of(middle, 1.0, epsilon) <= delta:
            high = middle
        else:
            low = middle
    return high * _SLACK


def epsilon_of(sigma: float, sensitivity: float, delta: float) -> float:
    """The smallest epsilon for which noise of standard deviation ``sigma`` is (epsilon, delta)-private.

    Infinite where there is no noise, 0 where delta alone covers it.

    Raises:
        InputError: sigma or the sensitivity is negative, or delta is not in (0, 1).

    Example:
        >>> round(epsilon_of(3.730632, 1.0, 1e-5), 5)
        1.0
    """
    _target(1.0, delta)
    if delta_of(sigma, sensitivity, 0.0) <= delta:
        return 0.0
    ratio = sensitivity / sigma if sigma else math.inf
    if ratio > 1e150:
        return math.inf
    # The privacy loss is N(ratio^2/2, ratio^2); its tail beyond the right-hand end has mass below delta.
    low, high = 0.0, 0.5 * ratio * ratio + ratio * math.sqrt(2 * math.log(1 / delta))
    while delta_of(1.0, ratio, high) > delta:  # only by rounding
        high *= _SLACK
    while low < (middle := 0.5 * (low + high)) < high:
        if delta_of(1.0, ratio, middle) <= delta:
            high = middle
        else:
            low = middle
    return high * _SLACK


def paper_sigma(epsilon: float, delta: float, n: float) -> float:
    """The noise that FedPFT prints: s = 4/(n epsilon) sqrt(5 ln(4/delta)), Beitollahi et al. 2024, Theorem 4.1.

    It is printed with the client's rows for ``n``; its proof needs the rows of one class at one client.

    Raises:
        InputError: epsilon, delta or n is out of range.

    Example:
        >>> round(paper_sigma(1.0, 1e-5, 100), 6)
        0.321238
    """
    _target(epsilon, delta)
    if not 0 < n < math.inf:
        raise InputError(f"n is {n}; the noise of Theorem 4.1 needs a number of rows above 0")
    return 4 / (n * epsilon) * math.sqrt(5 * math.log(4 / delta))


def paper_holds(epsilon: float, delta: float, n: float, sensitivity: float) -> bool:
    """Whether :func:`paper_sigma` is (epsilon, delta)-private for statistics of this true sensitivity, numerically.

    Theorem 4.1 says so for every epsilon; from about 10 at its own sensitivity, it is not.

    Args:
        epsilon: above 0.
        delta: in (0, 1).
        n: as in :func:`paper_sigma`.
        sensitivity: of the statistics of n rows, e.g. sqrt(4.5)/n.

    Raises:
        InputError: an argument is out of range.

    Example:
        >>> paper_holds(1.0, 1e-5, 100, 2 * 10**0.5 / 100), paper_holds(11.0, 1e-5, 100, 2 * 10**0.5 / 100)
        (True, False)
    """
    return delta_of(paper_sigma(epsilon, delta, n), sensitivity, epsilon) <= delta


def _finite(name: str, value: float, least: float) -> None:
    if not least <= value < math.inf:
        raise InputError(f"{name} is {value}; it must be a finite number of at least {least:g}")


def _target(epsilon: float, delta: float) -> None:
    """Refuse what no noise can promise."""
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}; it must be a finite number above 0, e.g. 1.0")
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta}; it must be between 0 and 1, e.g. 1e-5")
