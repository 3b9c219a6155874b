"""Covariances in tiles: factor, determinant and trace of the inverse are numpy's, whatever the sizes."""

import math

import numpy as np
import pytest

from fedfm.methods.fedpft.mixtures import fit, tiles


def centred(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32) * np.geomspace(3, 0.03, d, dtype=np.float32)
    return x, x.mean(0), (x - x.mean(0)).astype(float)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (5, 3), (4, 64), (33, 70), (300, 65), (129, 192), (40, 200), (500, 130)])
def test_factor_determinant_and_trace_are_those_of_numpy(n, d):
    """Fewer and more rows than columns, one tile and several, full ones and not."""
    x, middle, t = centred(n, d)
    floor = 1e-4 * float(t.var(0).mean()) + 1e-6
    sigma = t.T @ t / n + floor * np.eye(d)
    u, v, log_det = tiles.factor(tiles.columns(x, middle), d, floor)
    lower = np.zeros((d, d), np.float32)
    tiles.transpose(u, lower)
    np.testing.assert_allclose(lower, np.linalg.cholesky(sigma), atol=1e-6)
    assert log_det == pytest.approx(np.linalg.slogdet(sigma)[1], rel=1e-7, abs=1e-6)
    inverse = np.linalg.inv(sigma)
    assert tiles.inverse_trace(u, v, d) == pytest.approx(np.trace(inverse), rel=1e-6)
    for at in range(0, d, tiles.T):
        block = np.triu(u[at // tiles.T, at : at + tiles.T])
        np.testing.assert_allclose(block @ v[at // tiles.T], np.eye(tiles.T), atol=1e-9)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (3, 90), (70, 220), (65, 30)])
def test_the_small_matrix_has_the_large_ones_eigenvalues(n, d):
    x, middle, t = centred(n, d)
    floor = 1e-3
    small = t @ t.T / n + floor * np.eye(n)
    u, v, log_det = tiles.factor(tiles.columns_transposed(x, middle), n, floor)
    assert log_det == pytest.approx(np.linalg.slogdet(small)[1], rel=1e-9, abs=1e-9)
    assert tiles.inverse_trace(u, v, n) == pytest.approx(np.trace(np.linalg.inv(small)), rel=1e-9)


@pytest.mark.parametrize("n", [1, 2, 60, 66, 67, 199, 200, 201, 900])
def test_a_full_component_is_as_likely_as_its_rows_say(n):
    """On both sides of the number of rows from which the small matrix is taken; by eigenvalues, in float64."""
    d = 200
    x, _, t = centred(n, d, seed=n)
    x[:, ::7], t[:, ::7] = 0.5, 0  # features that do not vary
    values = np.maximum(np.linalg.eigvalsh(t.T @ t / n), 0)
    floor = 1e-6 * values.mean() + 1e-12
    exact = -0.5 * (d * math.log(2 * math.pi) + np.log(values + floor).sum() + (values / (values + floor)).sum())
    (found,) = fit([x], [1], "full", seeds=[0])
    assert found.log_likelihood == pytest.approx(exact, rel=1e-6)
    lower = found.mixture.scales[0].astype(float)
    np.testing.assert_allclose(lower @ lower.T, t.T @ t / n + floor * np.eye(d), atol=1e-5)
    assert not np.triu(lower, 1).any()
    assert (np.diagonal(lower) > 0).all()


@pytest.mark.parametrize("n", [40, 400])
def test_rows_on_a_line_have_a_positive_factor(n):
    """Every variance but one is the floor, a 2e8th of the largest: det and mean distance in closed form."""
    d = 200
    line = np.random.default_rng(0).normal(size=(n, 1)).astype(np.float32)
    x = (line * np.ones((1, d), np.float32)).astype(np.float32)
    largest = d * float(line.astype(float).var())
    floor = 1e-6 * largest / d + 1e-12
    log_det = math.log(largest + floor) + (d - 1) * math.log(floor)
    (found,) = fit([x], [1], "full", seeds=[0])
    expected = -0.5 * (d * math.log(2 * math.pi) + log_det + largest / (largest + floor))
    assert found.log_likelihood == pytest.approx(expected, rel=1e-6)
    assert (np.diagonal(found.mixture.scales[0]) > 0).all()
