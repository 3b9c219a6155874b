"""A mixture as a value: moments of its draws, its density, and its refusals."""

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from fedfm.methods.fedpft.mixtures import COVARIANCES, Mixture


def make(covariance, k=3, d=4, seed=0):
    rng = np.random.default_rng(seed)
    shape = {"spherical": (k,), "diag": (k, d), "full": (k, d, d)}[covariance]
    scales = rng.uniform(0.5, 2, shape)
    if covariance == "full":
        scales = np.tril(scales * rng.choice([-0.5, 0.5], shape)) + np.eye(d)
    means = rng.normal(size=(k, d)).astype(np.float32)
    return Mixture(rng.dirichlet(np.ones(k) * 5), means, scales.astype(np.float32))


def sigma(m, k):
    s = m.scales[k].astype(float)
    return s @ s.T if s.ndim == 2 else np.diag(np.broadcast_to(s, m.dim) ** 2)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_mixture_has_its_covariance_components_and_dimension(covariance):
    m = make(covariance)
    assert (m.covariance, m.components, m.dim) == (covariance, 3, 4)
    m.check()


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_draws_have_the_mixtures_moments(covariance):
    """Within five standard errors of mean and second moment, from 200,000 draws."""
    m, n = make(covariance), 200_000
    x = m.sample(n, np.random.default_rng(1)).astype(float)
    assert x.shape == (n, 4)
    mean = m.weights @ m.means
    second = sum(w * (sigma(m, k) + np.outer(m.means[k], m.means[k])) for k, w in enumerate(m.weights))
    got = x.T @ x / n
    assert (np.abs(x.mean(0) - mean) < 5 * x.std(0) / n**0.5).all()
    error = np.sqrt(((x[:, :, None] * x[:, None]).var(0)) / n)
    assert (np.abs(got - second) < 5 * error).all()


def test_draws_follow_the_generator_and_the_weights():
    m = make("diag")
    a, b = (m.sample(50, np.random.default_rng(3)) for _ in range(2))
    assert a.dtype == np.float32
    assert (a == b).all()
    assert m.sample(0, np.random.default_rng(0)).shape == (0, 4)
    far = Mixture(np.array([0.25, 0.0, 0.75]), np.array([[0.0], [10], [20]], np.float32), np.full(3, 0.1, np.float32))
    x = far.sample(4000, np.random.default_rng(0))[:, 0]
    assert abs((x < 5).mean() - 0.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5
    assert not ((x > 5) & (x < 15)).any()


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_the_density_is_that_of_scipy(covariance, monkeypatch):
    m = make(covariance)
    x = np.random.default_rng(2).normal(size=(50, 4)) * 3
    each = [multivariate_normal(m.means[k], sigma(m, k)).logpdf(x) for k in range(3)]
    expected = logsumexp(np.stack(each), axis=0, b=m.weights[:, None])
    np.testing.assert_allclose(m.log_prob(x), expected, rtol=1e-10)
    assert m.log_prob(x[:0]).shape == (0,)
    monkeypatch.setattr("fedfm.methods.fedpft.mixtures.mixture.ENTRIES", 28)  # seven rows at a time
    np.testing.assert_allclose(m.log_prob(x), expected, rtol=1e-10)


def test_a_component_without_weight_has_no_density():
    one, d = np.array([[0.0, 0.0]], np.float32), np.array([[0.0, 0.0], [9, 9]], np.float32)
    x = np.array([[9.0, 9.0], [0, 1]])
    alone = Mixture(np.ones(1), one, np.ones(1, np.float32)).log_prob(x)
    np.testing.assert_allclose(Mixture(np.array([1.0, 0.0]), d, np.ones(2, np.float32)).log_prob(x), alone)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"\(n, 4\)"):
        make("diag").log_prob(np.zeros((3, 5)))


def _with(m, **change):
    return Mixture(**{"weights": m.weights, "means": m.means, "scales": m.scales} | change)


@pytest.mark.parametrize(
    ("covariance", "change", "says"),
    [
        ("diag", {"weights": np.array([0.5, 0.5, 0.1])}, "simplex"),
        ("diag", {"weights": np.array([1.5, -0.5, 0.0])}, "simplex"),
        ("diag", {"weights": np.array([np.nan, 0.5, 0.5])}, "weights hold NaN"),
        ("diag", {"weights": np.ones(2) / 2}, "2 weights but 3 means"),
        ("diag", {"weights": np.ones((3, 1)) / 3}, r"expected \(K,\)"),
        ("diag", {"means": np.full((3, 4), np.inf, np.float32)}, "means hold NaN"),
        ("diag", {"scales": np.zeros((3, 4), np.float32)}, "positive"),
        ("diag", {"scales": np.full((3, 4), np.nan, np.float32)}, "scales hold NaN"),
        ("diag", {"scales": np.ones((3, 5), np.float32)}, "scales have shape"),
        ("spherical", {"scales": -np.ones(3, np.float32)}, "positive"),
        ("full", {"scales": np.zeros((3, 4, 4), np.float32)}, "diagonal must be positive"),
        ("full", {"scales": np.ones((3, 4, 4), np.float32)}, "lower triangular"),
    ],
)
def test_invalid_mixtures_are_refused(covariance, change, says):
    with pytest.raises(ValueError, match=says):
        _with(make(covariance), **change).check()
