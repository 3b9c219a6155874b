"""Mixtures on grids that do not depend on the number of rows to which they were fitted."""

import itertools

import numpy as np
import pytest

from fedfm.methods.fedpft.encoding import pack, unpack
from fedfm.methods.fedpft.mixtures import Mixture, fit, fit_uncounted
from fedfm.methods.fedpft.mixtures.uncounted import round_to_grid


def of_weights(weights, d=2):
    k = len(weights)
    return Mixture(np.asarray(weights, dtype=np.float64), np.zeros((k, d), np.float32), np.ones((k, d), np.float32))


def test_rounding_by_hand():
    """With K = 2, weights are eighths, and deviations are powers of two whose exponents are eighths.

    The deviation 1.05 becomes 2^0.125, and its means are eighths of 1. The deviation 0.9 becomes 2^-0.125, and its
    means are eighths of 1/2.
    """
    g = Mixture(
        np.array([0.3, 0.7]),
        np.array([[1.30, -0.05], [0.30, 10.0]], np.float32),
        np.array([[1.05, 1.0], [0.9, 4.1]], np.float32),
    )
    found = round_to_grid(g)
    assert found.weights.tolist() == [0.25, 0.75]
    assert found.scales == pytest.approx(np.array([[2**0.125, 1.0], [2**-0.125, 4.0]]))
    assert found.means.tolist() == [[1.25, 0.0], [0.3125, 10.0]]
    spherical = round_to_grid(Mixture(np.ones(1), np.array([[0.3, 0.7]], np.float32), np.array([2.05], np.float32)))
    assert (spherical.weights.tolist(), spherical.means.tolist(), spherical.scales.tolist()) == (
        [1.0],
        [[0.25, 0.75]],
        [2.0],
    )


@pytest.mark.parametrize("k", [2, 3])
def test_every_weight_occurs_whatever_the_count(k):
    """The weights of one message exclude no number of rows from ten a component on."""
    reached = []
    for n in range(10 * k, 10 * k + 25):
        parts = (p for p in itertools.product(range(2, n), repeat=k - 1) if n - sum(p) >= 2)
        reached.append({tuple(round_to_grid(of_weights([*np.array(p) / n, 1 - sum(p) / n])).weights) for p in parts})
    assert len(reached[0]) > 2 * k
    assert all(found == reached[0] for found in reached)


@pytest.mark.parametrize("k", [1, 2, 3, 7, 10, 50])
def test_weights_stay_near_and_on_the_simplex(k):
    rng = np.random.default_rng(k)
    for _ in range(50):
        weights = rng.dirichlet(np.full(k, 0.7))
        found = round_to_grid(of_weights(weights)).weights
        assert found.sum() == 1.0
        assert found.min() > 0
        units = found * 2**12
        assert np.all(units == np.round(units))
        coarse = 1 / (4 * k)
        enough = weights > coarse  # what is lifted to one step is taken from the others
        assert np.abs(found - weights)[enough].max(initial=0) <= coarse * (1 + np.sum(~enough))


def test_k_takes_two_values_with_outliers_too():
    rng = np.random.default_rng(0)
    groups = []
    for n in (12, 29, 30, 31, 45, 90, 300):
        x = rng.normal(size=(n, 6)).astype(np.float32)
        x[: n // 30] += 40 * rng.normal(size=(n // 30, 6))  # EM gives each of these a component, which is dropped
        groups.append(x)
    for covariance in ("spherical", "diag"):
        found = fit_uncounted(groups, 3, covariance, seeds=range(len(groups)))
        assert [g.components for g in found] == [1, 1, 3, 3, 3, 3, 3]
        for g, x in zip(found, groups, strict=True):
            g.check()
            assert g.covariance == covariance
            distance = np.linalg.norm(g.means[:, None] - x[: len(x) // 30], axis=2)
            assert (distance > 1).all()  # no component sits on an outlier


def test_no_group_has_no_mixture():
    assert fit_uncounted([], 3, "diag", seeds=[]) == []


def test_rows_that_cannot_be_split_have_one_component():
    x = np.ones((40, 3), np.float32)
    (g,) = fit_uncounted([x], 4, "diag", seeds=[0])
    assert g.components == 1


def test_the_grids_survive_float16():
    x = np.random.default_rng(3).normal(5, 2, size=(100, 8)).astype(np.float32)
    (g,) = fit_uncounted([x], 5, "diag", seeds=[1])
    (sent,) = unpack(pack([g], "float16"))
    assert sent.weights.tolist() == g.weights.tolist()
    assert np.array_equal(sent.means, g.means)
    assert sent.scales == pytest.approx(g.scales, rel=2**-11)


def test_rounding_moves_a_mean_less_than_a_tenth_of_its_deviation():
    x = np.random.default_rng(4).normal(size=(500, 10)).astype(np.float32)
    (g,), (f,) = fit_uncounted([x], 1, "diag", seeds=[0]), fit([x], [1], "diag", seeds=[0])
    assert np.all(np.abs(g.means - f.mixture.means) <= f.mixture.scales * 2 ** (1 / 16) / 16 + 1e-6)
    assert np.abs(np.log2(g.scales / f.mixture.scales)).max() <= 1 / 16 + 1e-6


def test_a_full_covariance_is_refused():
    with pytest.raises(ValueError, match="rank"):
        fit_uncounted([np.ones((40, 3), np.float32)], 2, "full", seeds=[0])
