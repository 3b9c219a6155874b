"""Theorem 4.2: numbers worked by hand, and known divergences."""

import numpy as np
import pytest
from scipy.stats import beta, norm

from fedfm.methods.fedpft.bound import Divergence, assemble, bound, divergence
from fedfm.methods.fedpft.mixtures import Mixture


def test_the_numbers_worked_by_hand():
    cells = [[Divergence(2 * 0.2**2, 0.2)], [Divergence(2 * 0.1**2, 0.1)]]
    found = assemble(0.03, [[60], [40]], cells)
    assert found.ours == pytest.approx(0.03 + 0.12 + 0.04)
    assert found.printed == pytest.approx(0.06 + 0.2 + 0.1)
    assert not found.vacuous


def test_rows_that_nobody_sent_count_as_errors():
    cells = [[Divergence(2 * 0.2**2, 0.2)], [Divergence(2 * 0.1**2, 0.1)]]
    found = assemble(0.03, [[60], [40]], cells, withheld=25)
    assert found.ours == pytest.approx((100 * 0.19 + 25) / 125)
    assert found.printed == pytest.approx(0.36)  # the paper sends every class


def test_the_loss_is_an_upper_limit():
    cells = [[Divergence(0.0, 0.0)]]
    assert bound(3, 100, [[10]], cells).synthetic_loss == pytest.approx(beta.ppf(0.975, 4, 97))
    assert bound(100, 100, [[10]], cells).vacuous
    with pytest.raises(ValueError, match="draws"):
        bound(0, 0, [[10]], cells)


def test_the_divergences_are_measured_and_have_a_margin():
    """400 draws of a coin of chance TV a cell: ours is below loss~ + TV in at most 2.5 % of all cases."""
    rng, counts, true = np.random.default_rng(0), [[300, 50], [50]], 0.3
    weights = np.array([0.75, 0.125, 0.125])
    assert bound(0, 10**9, counts, [[Divergence(0, 0.3)] * 2, [Divergence(0, 0.3)]]).ours == pytest.approx(
        0.3 + np.sqrt(np.log(40) * (weights**2).sum() / 800), abs=1e-6
    )
    below = 0
    for _ in range(400):
        a, b, c = (Divergence(0.0, tv) for tv in rng.binomial(400, true, 3) / 400)
        below += bound(0, 10**9, counts, [[a, b], [c]]).ours < true
    assert below <= 10


def test_divergences_from_one_normal_to_another():
    """One row smoothed by N(0, w^2) is N(x, w^2): both divergences have closed forms."""
    w, shift = 0.5, 0.8
    g = Mixture(np.ones(1), np.array([[shift]], dtype=np.float32), np.array([w], dtype=np.float32))
    found = divergence(np.zeros((1, 1)), g, w, np.random.default_rng(0), draws=40_000)
    assert found.kl == pytest.approx(shift**2 / (2 * w**2), rel=0.03)
    assert found.tv == pytest.approx(2 * norm.cdf(shift / (2 * w)) - 1, rel=0.03)
    same = Mixture(np.ones(1), np.zeros((1, 1), dtype=np.float32), np.array([w], dtype=np.float32))
    found = divergence(np.zeros((5, 1)), same, w, np.random.default_rng(0))
    assert found.kl == pytest.approx(0, abs=1e-5)
    assert found.tv == pytest.approx(0, abs=1e-5)


def test_in_many_dimensions_it_is_near_one_and_never_falsely_zero():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(300, 192)) / np.sqrt(192)
    mean, std = x.mean(0, keepdims=True).astype(np.float32), x.std(0, keepdims=True).astype(np.float32)
    found = divergence(x, Mixture(np.ones(1), mean, std), 0.1 * float(std.mean()), rng)
    assert found.tv > 0.95
    assert found.kl > 10
