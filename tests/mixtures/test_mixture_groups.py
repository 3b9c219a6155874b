"""Groups as clients have them: one row, equal rows, constants; a likelihood that never falls; each group's own bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture_em import covariances, one, same

from fedfm.methods.fedpft.mixtures import COVARIANCES, fit

groups = st.tuples(
    st.integers(1, 40),  # rows
    st.integers(1, 6),  # dimensions
    st.integers(1, 5),  # components
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.sampled_from(["plain", "duplicates", "constant", "near", "few"]),
    st.sampled_from([1e-3, 1.0, 30.0]),
    st.integers(0, 10**6),
)


def hard(n, d, k, dtype, kind, size, seed):
    """A group as clients have them: equal rows, constant features, rows that differ by the floor, few values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) + 2 * rng.normal(size=(3, d))[rng.integers(0, 3, n)]
    if kind == "duplicates":
        x = x[rng.integers(0, max(1, n // 4), n)]
    if kind == "constant":
        x[:, rng.random(d) < 0.5] = 0.7
    if kind == "near":
        x = x[rng.integers(0, max(1, n // 4), n)] + 1e-3 * rng.normal(size=(n, d))
    if kind == "few":
        x = np.round(x)
    return (size * x).astype(dtype), k


@settings(max_examples=150, deadline=None)
@given(group=groups, covariance=st.sampled_from(COVARIANCES))
def test_the_log_likelihood_never_falls_and_the_mixture_is_one(group, covariance):
    """Fits of 1, 2, ... E steps are the steps of one; up to the rounding of float32 data."""
    x, k = hard(*group)
    found = [one(x, k, covariance, max_iter=m, tol=0.0, seeds=[group[-1]]) for m in range(1, 7)]
    lls = [f.log_likelihood if f.mixture.components > 1 else f.mixture.log_prob(x).mean() for f in found]
    assert np.isfinite(lls).all()
    assert (np.diff(lls) >= -2e-6 * (x.shape[1] + np.abs(lls[1:]))).all(), lls
    for f in found:
        f.mixture.check()
        assert 1 <= f.mixture.components <= min(k, len(x))
        assert f.mixture.means.dtype == f.mixture.scales.dtype == np.float32
        assert (f.mixture.scales > 0).all() or covariance == "full"


@settings(max_examples=40, deadline=None)
@given(many=st.lists(groups, min_size=2, max_size=6), covariance=st.sampled_from(COVARIANCES), data=st.data())
def test_a_group_has_the_bits_it_has_alone(many, covariance, data):
    """Whatever its neighbours and their order."""
    pairs = [hard(n, 5, *rest) for n, _, *rest in many]
    x, k, seeds = [p[0] for p in pairs], [p[1] for p in pairs], [g[-1] for g in many]
    alone = [fit([a], [b], covariance, seeds=[c])[0] for a, b, c in zip(x, k, seeds, strict=True)]
    order = data.draw(st.permutations(range(len(x))))
    both = fit(*([v[i] for i in order] for v in (x, k)), covariance, seeds=[seeds[i] for i in order])
    for i, got in zip(order, both, strict=True):
        assert same(alone[i], got)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_one_row_and_equal_rows(covariance):
    """Mean, and the floor as variance: 1e-12 where nothing varies."""
    for x in (np.array([[0.5, -2.0, 3.0]]), np.repeat([[0.5, -2.0, 3.0]], 6, axis=0)):
        m = one(x, 4, covariance).mixture
        assert m.components == 1
        np.testing.assert_array_equal(m.means, x[:1].astype(np.float32))
        np.testing.assert_allclose(np.diagonal(covariances(m), axis1=1, axis2=2), 1e-12, rtol=1e-5)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_step_that_the_floor_makes_worse_is_undone(covariance):
    """Rows that differ by as much as the floor's standard deviation; with tolerance 0 nothing else ends a fit early."""
    ended = 0
    for seed in range(60):
        x, k = hard(20, 3, 5, np.float32, "near", 1.0, seed)
        found = one(x, k, covariance, tol=0.0, max_iter=60, seeds=[seed])
        if found.converged:
            ended += 1
            assert found.iterations < 60
            assert found.log_likelihood == pytest.approx(found.mixture.log_prob(x).mean(), abs=0.02)
    assert ended
