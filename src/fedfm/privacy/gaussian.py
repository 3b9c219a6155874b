"""The Gaussian mechanism, calibrated exactly.

Balle, Wang: Improving the Gaussian Mechanism for Differential Privacy: Analytical Calibration and Optimal Denoising.
ICML 2018. arXiv:1805.06530, Theorem 8 and Algorithm 1. The module also has the noise of FedPFT (Beitollahi et al. 2024,
Theorem 4.1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from fedfm.errors import InputError

_SLACK = (
    1 + 1e-12
)  # factor on sigma and epsilon: covers the rounding of delta_of, so that the guarantee holds in floats


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
    _finite("sigma", sigma)
    _finite("sensitivity", sensitivity)
    if not epsilon >= 0:
        raise InputError(f"epsilon is {epsilon}; it must be a number of at least 0")
    if sensitivity == 0 or epsilon == math.inf:
        return 0.0
    if sigma == 0 or sensitivity / sigma == math.inf:
        return 1.0
    from scipy.special import erfcx, ndtr

    half, shift = 0.5 * sensitivity / sigma, epsilon * (sigma / sensitivity)
    low, high = shift - half, shift + half
    if abs(low) > 1e150:
        return 1.0 if low < 0 else 0.0
    # e^epsilon phi(high) = phi(low) avoids e^epsilon, which overflows. With Mills' ratio M,
    # delta = phi(low) (M(low) - M(high)).
    scale = 0.5 * math.exp(-0.5 * low * low)
    if high - low < 0.5:  # the difference would cancel: integrate -M'(u) = 1 - u M(u)
        nodes, weights = np.polynomial.legendre.leggauss(12)  # exact up to rounding, since the integrand is smooth
        u = low + half * (nodes + 1)
        slope = math.sqrt(2 / math.pi) - u * erfcx(u / math.sqrt(2))
        return max(scale * half * float(weights @ slope), 0.0)
    if low < 0:  # here delta is not small, and M(low) may overflow
        return max(float(ndtr(-low)) - scale * float(erfcx(high / math.sqrt(2))), 0.0)
    return max(scale * float(erfcx(low / math.sqrt(2)) - erfcx(high / math.sqrt(2))), 0.0)


def sigma_for(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """The smallest noise that is (epsilon, delta)-private: Balle & Wang 2018, Algorithm 1, by bisection.

    Sigma is proportional to the sensitivity.

    Raises:
        InputError: epsilon is not a positive number, delta is not in (0, 1), or the sensitivity is negative.

    Example:
        >>> round(sigma_for(1.0, 1e-5), 6)
        3.730632
    """
    _target(epsilon, delta)
    _finite("sensitivity", sensitivity)
    return sensitivity * _unit_sigma(epsilon, delta)


@functools.lru_cache(maxsize=64)
def _unit_sigma(epsilon: float, delta: float) -> float:
    low = high = 1.0
    while delta_of(low, 1.0, epsilon) <= delta:
        low /= 2
    while delta_of(high, 1.0, epsilon) > delta:
        high *= 2
    return _least(lambda sigma: delta_of(sigma, 1.0, epsilon) <= delta, low, high)


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number between ``low`` and ``high`` for which ``holds`` is true, by bisection, rounded up."""
    while low < (middle := 0.5 * (low + high)) < high:
        if holds(middle):
            high = middle
        else:
            low = middle
    return high * _SLACK


def epsilon_of(sigma: float, sensitivity: float, delta: float) -> float:
    """The smallest epsilon for which noise of standard deviation ``sigma`` is (epsilon, delta)-private.

    Epsilon is infinite without noise, and 0 if delta alone suffices.

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
    # The privacy loss is N(ratio^2/2, ratio^2); its tail beyond ``high`` has mass below delta.
    high = 0.5 * ratio * ratio + ratio * math.sqrt(2 * math.log(1 / delta))
    while delta_of(1.0, ratio, high) > delta:  # true by rounding only
        high *= _SLACK
    return _least(lambda epsilon: delta_of(1.0, ratio, epsilon) <= delta, 0.0, high)


def paper_sigma(epsilon: float, delta: float, n: float) -> float:
    """FedPFT's noise as in its paper: s = 4/(n epsilon) sqrt(5 ln(4/delta)), Beitollahi et al. 2024, Theorem 4.1.

    In the paper, ``n`` is the client's number of rows; the proof needs the number of rows of one class at the client.

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


def _finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise InputError(f"{name} is {value}; it must be a finite number of at least 0")


def _target(epsilon: float, delta: float) -> None:
    if not 0 < epsilon < math.inf:
        raise InputError(f"epsilon is {epsilon}; it must be a finite number above 0, e.g. 1.0")
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta}; it must be between 0 and 1, e.g. 1e-5")
