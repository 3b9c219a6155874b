"""The Gaussian mechanism against the integral that defines it, and the figures of FedPFT's Theorem 4.1 by hand."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedfm.errors import InputError
from fedfm.privacy.gaussian import delta_of, epsilon_of, paper_sigma, sigma_for

OWN = 2 * math.sqrt(10)  # times 1/n: the sensitivity that Theorem 4.1 takes
TRUE = math.sqrt(20)  # of its statistics, a mean and a centred covariance, see test_plan


def hockey_stick(sigma, sensitivity, epsilon):
    """The integral of max(p - e^epsilon q, 0), p = N(s, sigma^2), q = N(0, sigma^2)."""

    def above(z):  # in units of sigma; p - e^eps q = p (1 - e^(eps - loss))
        loss = sensitivity / sigma * z - 0.5 * (sensitivity / sigma) ** 2
        return norm.pdf(z, loc=sensitivity / sigma) * -math.expm1(min(epsilon - loss, 0.0))

    low = sensitivity / (2 * sigma) + epsilon * sigma / sensitivity  # where the integrand starts
    top = max(low, sensitivity / sigma)
    parts = [low, *(p for p in (top, top + 1, top + 3, top + 8) if p > low), top + 40]
    return sum(quad(above, a, b, epsabs=0, epsrel=1e-11, limit=200)[0] for a, b in pairwise(parts))


@pytest.mark.each_value
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.5, 1.0, 4.0, 10.0, 60.0, 400.0])
@pytest.mark.parametrize("ratio", [0.03, 0.2, 1.0, 3.0, 10.0, 28.0])
def test_delta_is_the_hockey_stick_divergence(ratio, epsilon):
    for sigma in (1.0, 1e-4):
        exact, got = hockey_stick(sigma, ratio * sigma, epsilon), delta_of(sigma, ratio * sigma, epsilon)
        assert got == pytest.approx(exact, rel=1e-8, abs=1e-300)


@settings(max_examples=100, deadline=None)
@given(
    epsilon=st.floats(1e-4, 1e5),
    log_delta=st.floats(math.log(1e-30), math.log(0.5)),
    sensitivity=st.floats(1e-6, 1e6),
)
def test_sigma_epsilon_and_delta_invert_each_other(epsilon, log_delta, sensitivity):
    delta = math.exp(log_delta)
    sigma = sigma_for(epsilon, delta, sensitivity)
    assert delta_of(sigma, sensitivity, epsilon) <= delta  # what is promised holds
    assert delta_of(sigma * (1 - 1e-6), sensitivity, epsilon) > delta  # and costs no more than it must
    assert epsilon_of(sigma, sensitivity, delta) == pytest.approx(epsilon, rel=1e-6)


def test_numbers_by_hand():
    assert sigma_for(1.0, 1e-5) == pytest.approx(3.730632, abs=5e-7)  # dp-accounting 0.6.0: 3.73063
    assert paper_sigma(1.0, 1e-5, 100) == pytest.approx(0.321238, abs=5e-7)
    assert paper_sigma(1.0, 0.02, 50) == pytest.approx(0.411760, abs=5e-7)
    assert math.sqrt(4.5) / 50 * sigma_for(1.0, 0.02) == pytest.approx(0.069953, abs=5e-7)
    # n_i = 10 n_ic: what is claimed to be epsilon = 1
    assert epsilon_of(paper_sigma(1.0, 1e-5, 10), TRUE, 1e-5) == pytest.approx(6.45, abs=0.005)


@pytest.mark.parametrize(
    ("delta", "sensitivity", "holds", "fails"),
    [
        (0.01, OWN, 9.6, 9.7),
        (0.02, OWN, 9.4, 9.5),
        (1e-5, OWN, 10.8, 10.9),
        (0.02, TRUE, 24.9, 25.0),
        (1e-5, TRUE, 43.7, 43.8),
    ],
)
@pytest.mark.parametrize("n", [1, 50, 1000])
def test_where_theorem_4_1_fails(n, delta, sensitivity, holds, fails):
    assert delta_of(paper_sigma(holds, delta, n), sensitivity / n, holds) <= delta
    assert delta_of(paper_sigma(fails, delta, n), sensitivity / n, fails) > delta


@pytest.mark.parametrize(("delta", "holds", "fails"), [(0.01, 7.9, 8.0), (1e-5, 9.3, 9.4)])
def test_where_its_lemma_fails(delta, holds, fails):
    def lemma(epsilon):
        return math.sqrt(2 * math.log(2 / delta)) / epsilon  # Lemma E.2, "for all epsilon > 0"

    assert delta_of(lemma(holds), 1.0, holds) <= delta
    assert delta_of(lemma(fails), 1.0, fails) > delta


def test_extremes_neither_overflow_nor_cancel():
    assert delta_of(0.0, 1.0, 1e9) == 1.0
    assert delta_of(1e-320, 1.0, 1.0) == 1.0
    assert delta_of(1.0, 0.0, 0.0) == 0.0
    assert delta_of(1.0, 1.0, math.inf) == 0.0
    assert delta_of(1e300, 1e-300, 1e300) == 0.0
    assert delta_of(1e-3, 1.0, 499_999.0) == pytest.approx(0.5, abs=2e-3)  # e^epsilon has 217,000 digits
    assert delta_of(1e4, 1.0, 0.0) == pytest.approx(1e-4 / math.sqrt(2 * math.pi), rel=1e-9)
    assert 0 < delta_of(1.0, 1.0, 36.0) < 1e-277
    assert sigma_for(1e8, 1e-5) == pytest.approx(1 / math.sqrt(2e8), rel=1e-3)
    assert epsilon_of(0.0, 1.0, 1e-5) == math.inf
    assert epsilon_of(1.0, 0.0, 1e-5) == 0.0
    assert epsilon_of(1e6, 1.0, 1e-5) == 0.0  # delta alone covers it


def test_delta_falls_in_epsilon_and_sigma():
    grid = [0.05 * 1.1**i for i in range(80)]
    for values in ([delta_of(s, 1.0, 1.0) for s in grid], [delta_of(0.7, 1.0, e) for e in grid]):
        assert all(a >= b for a, b in pairwise(values))


@pytest.mark.parametrize(
    "call",
    [
        lambda: sigma_for(0.0, 1e-5),
        lambda: sigma_for(-1.0, 1e-5),
        lambda: sigma_for(math.nan, 1e-5),
        lambda: sigma_for(math.inf, 1e-5),
        lambda: sigma_for(1.0, 0.0),
        lambda: sigma_for(1.0, 1.0),
        lambda: sigma_for(1.0, math.nan),
        lambda: sigma_for(1.0, 1e-5, -1.0),
        lambda: delta_of(-1.0, 1.0, 1.0),
        lambda: delta_of(math.nan, 1.0, 1.0),
        lambda: delta_of(1.0, math.inf, 1.0),
        lambda: delta_of(1.0, 1.0, -1.0),
        lambda: epsilon_of(1.0, 1.0, 1.5),
        lambda: paper_sigma(1.0, 1e-5, 0),
        lambda: paper_sigma(1.0, 2.0, 10),
    ],
)
def test_impossible_guarantees_are_refused(call):
    with pytest.raises(InputError, match=r"must be|needs"):
        call()
