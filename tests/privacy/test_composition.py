"""Composed epsilon against closed forms, quadrature and another accountant."""

import math

import numpy as np
import pytest
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from fedfm.errors import InputError
from fedfm.privacy.composition import Releases, epsilon_of, noise_multiplier_for

NOISE = st.floats(0.7, 20)


def one_sampled(z: float, q: float, delta: float) -> float:
    """Epsilon of one Poisson-sampled Gaussian release that removes the unit, which is the worse one, in closed form.

    The ratio of the densities, 1 - q + q exp((2x - 1) / (2 z^2)), grows with x: where it passes e^epsilon the integral
    of their difference begins.
    """

    def excess(epsilon: float) -> float:
        x = z * z * math.log((math.exp(epsilon) - 1 + q) / q) + 0.5
        without, with_it = stats.norm.sf(x / z), stats.norm.sf((x - 1) / z)
        return (1 - q) * without + q * with_it - math.exp(epsilon) * without - delta

    return float(optimize.brentq(excess, 1e-9, 50, xtol=1e-12))


@given(st.lists(st.tuples(NOISE, st.integers(1, 50)), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_unsampled_releases_add_up_as_one_gaussian(several):
    mu = math.sqrt(sum(t / z**2 for z, t in several))
    epsilon = epsilon_of([Releases(z, t) for z, t in several], 1e-5)
    delta = stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(1e-5, rel=1e-5)  # Balle and Wang 2018, Theorem 8


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.1), (2.0, 0.5), (0.8, 0.02)])
def test_one_sampled_release_is_the_closed_form_from_above(z, q):
    right = one_sampled(z, q, 1e-5)
    assert right <= epsilon_of([Releases(z, 1, q)], 1e-5) <= right * 1.001


@pytest.mark.proof
def test_the_published_multipliers_of_a_hundred_sampled_rounds():
    assert noise_multiplier_for(1, 1e-5, 100, 0.1) == pytest.approx(3.94, abs=0.01)
    assert noise_multiplier_for(8, 1e-5, 100, 0.1) == pytest.approx(0.937, abs=0.002)
    assert noise_multiplier_for(1, 1e-5, 100) == pytest.approx(37.306, abs=0.001)


def test_epsilon_is_never_above_that_of_the_renyi_accountant():
    import dp_accounting as dp
    from dp_accounting.rdp import RdpAccountant

    for z, t, q in ((1.0, 100, 0.05), (2.0, 50, 0.5), (4.0, 10, 1.0)):
        renyi = RdpAccountant()
        renyi.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(z)), t)
        assert epsilon_of([Releases(z, t, q)], 1e-5) <= renyi.get_epsilon(1e-5)


@pytest.mark.proof
@given(st.floats(0.6, 8), st.floats(0.01, 1), st.integers(1, 300))
@settings(max_examples=12, deadline=None)
def test_epsilon_is_never_above_that_of_flowers_accountant(z, q, times):
    flower = RdpAccountant(PrivacyConfig(1e-5, 1000, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.POISSON))
    rows = max(round(1000 * q), 1)
    flower.compose(GaussianPrivacyEvent(noise_multiplier=z, sample_size=rows, population_size=1000), times)
    assert epsilon_of([Releases(z, times, rows / 1000)], 1e-5) <= flower.get_epsilon(1e-5)


@given(st.floats(0.3, 12), st.integers(1, 200), st.sampled_from([1.0, 0.3, 0.05]))
@settings(max_examples=8, deadline=None)
@pytest.mark.proof
def test_the_noise_for_a_target_keeps_it_and_less_noise_does_not(epsilon, times, rate):
    z = noise_multiplier_for(epsilon, 1e-5, times, rate)
    assert epsilon_of([Releases(z, times, rate)], 1e-5) <= epsilon
    assert epsilon_of([Releases(z * 0.99, times, rate)], 1e-5) > epsilon


@pytest.mark.proof
def test_sampled_and_unsampled_releases_add_up():
    both = epsilon_of([Releases(2.0, 5), Releases(1.0, 20, 0.1)], 1e-5)
    parts = [epsilon_of([Releases(2.0, 5)], 1e-5), epsilon_of([Releases(1.0, 20, 0.1)], 1e-5)]
    assert max(parts) < both < sum(parts)


def test_no_release_spends_nothing_and_no_noise_gives_infinity():
    assert epsilon_of([], 1e-5) == epsilon_of([Releases(1.0, 0)], 1e-5) == 0
    assert np.isinf(epsilon_of([Releases(1.0, 3), Releases(0.0)], 1e-5))


@pytest.mark.parametrize(("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 1), (1e-9, 1e-300)])
def test_unreachable_targets_are_refused(epsilon, delta):
    with pytest.raises(InputError):
        noise_multiplier_for(epsilon, delta, 100)


def test_little_noise_is_accounted_at_once_and_from_above():
    """Where the grid would take minutes, sampling counts for nothing."""
    few = [Releases(0.02, 1, 0.5)]
    assert epsilon_of(few, 1e-5) == epsilon_of([Releases(0.02)], 1e-5)
    assert epsilon_of([Releases(0.099, 1, 0.5)], 1e-5) > 20 * epsilon_of([Releases(1.0, 1, 0.5)], 1e-5)
