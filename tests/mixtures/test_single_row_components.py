"""Mixtures in which no component sits on a single row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfm.methods.fedpft.mixtures import COVARIANCES, fit, fit_without_singles
from fedfm.methods.fedpft.mixtures.singles import ALONE


def carried(found, rows):
    return found.mixture.weights * rows


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_an_outlier_gets_no_component_of_its_own(covariance):
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(60, 5)).astype(np.float32)
    x = plain.copy()
    x[7] = 40.0
    options = {"seeds": [3, 3]}
    before = fit([x, plain], [4, 4], covariance, **options)
    assert carried(before[0], 60).min() < ALONE  # what the other function is there for
    np.testing.assert_allclose(before[0].mixture.means[carried(before[0], 60) < 1.5], [x[7]], rtol=1e-4)
    after = fit_without_singles([x, plain], [4, 4], covariance, **options)
    assert carried(after[0], 60).min() >= ALONE
    assert after[0].mixture.components < 4
    assert np.linalg.norm(after[0].mixture.means - x[7], axis=1).min() > 1
    assert after[0].mixture.weights.sum() == pytest.approx(1)
    if carried(before[1], 60).min() >= ALONE:  # nothing to drop: the very mixture
        np.testing.assert_array_equal(after[1].mixture.means, before[1].mixture.means)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(COVARIANCES),
    st.integers(0, 5),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_no_component_rests_on_a_single_row_for_any_rows(n, k, covariance, outliers, twice, seed):
    """Heavy tails, fewer rows than components, copies: only a group of one row has a component of one."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(1.0, size=(n, 3)).clip(-1e6, 1e6)
    x[: min(outliers, n)] *= 100
    if twice:
        x[n // 2 :] = x[: n - n // 2]
    (found,) = fit_without_singles([x], [k], covariance, seeds=[seed])
    found.mixture.check()
    if n > 1:
        assert carried(found, n).min() >= ALONE
    assert 1 <= found.mixture.components <= min(n, k)


def test_three_rows_that_are_far_apart_share_one_component():
    x = np.array([[0.0, 0], [100, 0], [0, 100]])
    (found,) = fit_without_singles([x], [3], "diag", seeds=[0])
    np.testing.assert_allclose(found.mixture.means, [[100 / 3, 100 / 3]], rtol=1e-5)
