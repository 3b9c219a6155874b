"""One component of full covariance: factor and likelihood against eigenvalues, and on rows of few directions."""

import math

import numpy as np
import pytest

from fedfm.methods.fedpft.mixtures import fit


def centred(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32) * np.geomspace(3, 0.03, d, dtype=np.float32)
    return x, (x - x.mean(0)).astype(float)


@pytest.mark.parametrize(
    ("n", "d"),
    [(1, 1), (5, 3), (4, 64), (33, 70), (300, 65), *((n, 200) for n in (1, 2, 60, 66, 67, 199, 200, 201, 900))],
)
def test_a_full_component_is_as_likely_as_its_rows_say(n, d):
    """By eigenvalues, in float64; fewer rows than features as well."""
    x, t = centred(n, d, seed=n)
    x[:, ::7], t[:, ::7] = 0.5, 0  # features that do not vary
    values = np.maximum(np.linalg.eigvalsh(t.T @ t / n), 0)
    floor = 1e-6 * values.mean() + 1e-12
    exact = -0.5 * (d * math.log(2 * math.pi) + np.log(values + floor).sum() + (values / (values + floor)).sum())
    (found,) = fit([x], [1], "full", seeds=[0])
    assert found.mixture.log_prob(x).mean() == pytest.approx(exact, rel=1e-3)
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
    assert found.mixture.log_prob(x).mean() == pytest.approx(expected, rel=1e-3)
    assert (np.diagonal(found.mixture.scales[0]) > 0).all()
