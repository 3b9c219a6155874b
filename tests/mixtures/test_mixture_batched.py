"""EM in batches of tensors, on device "cpu" (and "cuda" where there is one): steps and ends of the compiled loops, from
the same starts.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mixture_em import blobs, covariances, one
from test_mixture_groups import hard

from fedfm.methods.fedpft.mixtures import COVARIANCES, batched, fit

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
DEVICES = ["cpu", pytest.param("cuda", marks=CUDA)]


def both(groups, components, covariance, device="cpu", **options):
    options = {"seeds": range(len(groups))} | options
    return zip(
        fit(groups, components, covariance, **options),
        fit(groups, components, covariance, device=device, **options),
        strict=True,
    )


def close(a, b, tolerance=1e-6):
    assert b.iterations == a.iterations
    assert b.converged == a.converged
    assert b.log_likelihood == pytest.approx(a.log_likelihood, rel=tolerance, abs=tolerance)
    assert b.mixture.means.dtype == b.mixture.scales.dtype == np.float32
    assert b.mixture.scales.shape == a.mixture.scales.shape
    np.testing.assert_allclose(b.mixture.weights, a.mixture.weights, atol=1e-5)
    np.testing.assert_allclose(b.mixture.means, a.mixture.means, atol=1e-3)
    np.testing.assert_allclose(covariances(b.mixture), covariances(a.mixture), atol=1e-3)
    b.mixture.check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_groups_of_many_sizes_end_where_the_compiled_loops_end(covariance, device):
    """One row to hundreds, one component to seven, k-means++ on both sides; fewer rows than features as well."""
    sizes = [(1, 1), (12, 2), (40, 4), (44, 3), (45, 1), (150, 7), (160, 5), (300, 7)]
    d = 4 if covariance == "full" else 20  # full ones of more features end at once
    groups = [blobs(n, d, k, seed=i, apart=1.5)[0] for i, (n, k) in enumerate(sizes)]
    pairs = list(both(groups, [k for _, k in sizes], covariance, device))
    assert max(a.iterations for a, _ in pairs) > 5
    assert len({a.iterations for a, _ in pairs}) > 2
    for a, b in pairs:
        close(a, b)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_fit_that_is_stopped_has_taken_the_same_steps(covariance, steps):
    x, start = blobs(200, 9, 4)
    ((a, b),) = both([x], [4], covariance, starts=[start], max_iter=steps, tol=0.0)
    assert not b.converged
    close(a, b)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 40),
            st.integers(1, 5),
            st.sampled_from([np.float16, np.float32, np.float64]),
            st.sampled_from(["plain", "duplicates", "constant", "few"]),
            st.sampled_from([1e-3, 1.0, 30.0]),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(COVARIANCES),
)
def test_hard_groups_take_the_same_first_steps_whatever_their_neighbours(many, covariance):
    """Equal rows, constant features, few values: two steps, before rounding can tell a knife's edge apart."""
    groups, components = zip(*(hard(n, 4, *rest) for n, *rest in many), strict=True)
    for a, b in both(groups, components, covariance, max_iter=2, tol=0.0):
        assert b.log_likelihood == pytest.approx(a.log_likelihood, rel=1e-5, abs=1e-5)
        assert b.mixture.components == a.mixture.components
        b.mixture.check()


def test_a_step_that_the_floor_makes_worse_is_undone():
    """The likelihood that is reported is then that of the mixture before the step, which comes back."""
    undone = 0
    for seed in range(40):
        x, k = hard(20, 3, 5, np.float32, "near", 1.0, seed)
        found = one(x, k, "full", tol=0.0, max_iter=60, seeds=[seed], device="cpu")
        if found.converged and found.iterations < 60:
            undone += 1
            assert found.log_likelihood == pytest.approx(found.mixture.log_prob(x).mean(), abs=0.02)
    assert undone


def test_buckets_hold_every_group_once_and_little_padding(monkeypatch):
    rng = np.random.default_rng(0)
    shapes = {i: (int(n), 16, 2 + i % 7) for i, n in enumerate(rng.integers(2, 600, 200))}
    for covariance in COVARIANCES:
        found = batched.buckets(shapes, covariance)
        assert sorted(i for bucket in found for i in bucket) == list(shapes)
        for bucket in found:
            sizes = [shapes[i][0] for i in bucket]
            assert min(sizes) >= 0.75 * max(sizes)
        assert len(found) < 30
    monkeypatch.setattr(batched, "ENTRIES", 1)
    assert all(len(bucket) == 1 for bucket in batched.buckets(shapes, "diag"))
