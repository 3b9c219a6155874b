"""EM: numbers by hand, scikit-learn's and a textbook loop's numbers, starts, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.mixture import GaussianMixture

from fedfm.methods.fedpft.mixtures import COVARIANCES, capacity, fit, kmeans


def floor_of(x):
    return 1e-6 * np.asarray(x, float).var(0).mean() + 1e-12


def one(x, k, covariance, **options):
    return fit([np.asarray(x)], [k], covariance, **{"seeds": [0]} | options)[0]


def blobs(n, d, k, seed=0, apart=1.0, dtype=np.float32):
    """Rows around k centres that overlap, and labels that are wrong for a fifth of them."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, k, n)
    label[:k] = np.arange(k)
    spread = rng.uniform(0.5, 1.5, (k, d))
    x = apart * rng.normal(size=(k, d))[label] + spread[label] * rng.normal(size=(n, d))
    start = np.where(rng.random(n) < 0.2, rng.integers(0, k, n), label)
    start[:k] = np.arange(k)
    return x.astype(dtype), start


def test_one_component_by_hand():
    """{(0,0), (2,0)}: mu = (1, 0), variances (1, 0) and 1/2; {(1,0), (0,1)}: lambda = (1 - 1/2)/2, the hand checks."""
    x = np.array([[0.0, 0], [2, 0]])
    floor = 1e-6 * 0.5 + 1e-12
    for covariance, expected in (
        ("diag", [[1 + floor, floor]]),
        ("spherical", [0.5 + floor]),
        ("full", [[[1 + floor, 0], [0, floor]]]),
    ):
        m = one(x, 1, covariance).mixture
        assert m.weights.tolist() == [1]
        np.testing.assert_allclose(m.means, [[1, 0]])
        np.testing.assert_allclose(m.scales.astype(float) ** 2, expected, rtol=1e-6)
    (spherical,) = one([[1.0, 0], [0, 1]], 1, "spherical").mixture.scales
    assert spherical**2 == pytest.approx(0.25, rel=1e-5)


def test_two_components_by_hand():
    """Four points in two far pairs: each pair's mean, its variance 1/4 along the first axis, half of the weight."""
    x = np.array([[0.0, 0], [1, 0], [100, 100], [101, 100]])
    found = one(x, 2, "diag")
    order = np.argsort(found.mixture.means[:, 0])
    np.testing.assert_allclose(found.mixture.means[order], [[0.5, 0], [100.5, 100]], atol=1e-5)
    np.testing.assert_allclose(found.mixture.scales[:, 0] ** 2, 0.25 + floor_of(x), rtol=1e-4)
    np.testing.assert_allclose(found.mixture.scales[:, 1] ** 2, floor_of(x), rtol=1e-4)
    assert found.mixture.weights.tolist() == [0.5, 0.5]


def test_the_number_of_components_follows_the_rows():
    assert [capacity(n, 10) for n in (0, 1, 9, 10, 19, 20, 99, 100, 10**6)] == [1, 1, 1, 1, 1, 2, 9, 10, 10]
    assert capacity(10**6, 1) == 1


def textbook(x, start, k, covariance, floor, steps):
    """EM as one writes it down, in float64; the mean log-likelihoods of the E steps and the last parameters."""
    x, n = np.asarray(x, float), len(x)
    r, lls, w, mu, sigma = np.eye(k)[start], [], None, None, None
    for step in range(steps + 1):
        if step:
            joint = np.stack([multivariate_normal(mu[c], sigma[c]).logpdf(x) + np.log(w[c]) for c in range(k)], 1)
            lls.append(logsumexp(joint, axis=1).mean())
            r = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
        w, mu = r.sum(0) / n, (r.T @ x) / r.sum(0)[:, None]
        sigma = [((x - mu[c]).T * r[:, c]) @ (x - mu[c]) / r[:, c].sum() for c in range(k)]
        if covariance != "full":
            sigma = [np.diag(np.diag(s)) for s in sigma]
        if covariance == "spherical":
            sigma = [np.eye(len(s)) * np.trace(s) / len(s) for s in sigma]
        sigma = [s + floor * np.eye(len(s)) for s in sigma]
    return lls, w, mu, sigma


def covariances(m):
    scales = m.scales.astype(float)
    if scales.ndim == 3:
        return scales @ scales.transpose(0, 2, 1)
    return np.stack([np.diag(np.broadcast_to(s, m.dim) ** 2) for s in scales])


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(("n", "d", "k"), [(200, 3, 4), (60, 17, 2), (700, 8, 3), (9, 12, 2), (30, 40, 1)])
def test_the_steps_are_those_of_a_textbook(covariance, n, d, k):
    """Also with fewer rows than dimensions, and more rows than one span of float32 sums."""
    x, start = blobs(n, d, k)
    for steps in (1, 2, 5):
        got = one(x, k, covariance, starts=[start], max_iter=steps, tol=0.0)
        lls, w, mu, sigma = textbook(x, start, k, covariance, floor_of(x), steps)
        m = got.mixture
        found = got.log_likelihood if k > 1 else m.log_prob(x).mean()
        assert found == pytest.approx(lls[-1], abs=1e-4)
        np.testing.assert_allclose(m.weights, w, atol=1e-5)
        np.testing.assert_allclose(m.means, mu, atol=1e-4)
        np.testing.assert_allclose(covariances(m), sigma, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize(("n", "d", "k"), [(400, 6, 3), (250, 192, 5), (150, 20, 10)])
def test_em_converges_to_the_result_of_scikit_learn(covariance, n, d, k):
    """GaussianMixture in float64 from the same weights, means and precisions; the same steps, tolerance 1e-3."""
    x, start = blobs(n, d, k, seed=1)
    floor = floor_of(x)
    _, w, mu, sigma = textbook(x, start, k, covariance, floor, 0)
    precisions = np.stack([np.linalg.inv(s) for s in sigma])
    precisions = (precisions + precisions.transpose(0, 2, 1)) / 2
    if covariance != "full":
        precisions = np.diagonal(precisions, axis1=1, axis2=2)
    if covariance == "spherical":
        precisions = precisions[:, 0]
    peer = GaussianMixture(
        k, covariance_type=covariance, reg_covar=floor, weights_init=w, means_init=mu, precisions_init=precisions
    ).fit(x.astype(float))
    got = one(x, k, covariance, starts=[start])
    assert got.converged
    assert got.iterations == peer.n_iter_
    assert got.log_likelihood == pytest.approx(peer.lower_bound_, abs=1e-4)
    assert got.mixture.log_prob(x).mean() == pytest.approx(peer.score(x.astype(float)), abs=1e-4)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_one_component_is_scikit_learns(covariance):
    """Its closed form needs one E step; 5 rows in 12 dimensions as well."""
    for n in (5, 300):
        x, _ = blobs(n, 12, 1, dtype=np.float64)
        peer = GaussianMixture(1, covariance_type=covariance, reg_covar=floor_of(x)).fit(x)
        got = one(x, 1, covariance)
        assert (got.iterations, got.converged) == (1, True)
        assert got.mixture.log_prob(x).mean() == pytest.approx(peer.lower_bound_, abs=1e-4)
        np.testing.assert_allclose(got.mixture.means, peer.means_, atol=1e-5)


def same(a, b):
    fields = [(getattr(a.mixture, f), getattr(b.mixture, f)) for f in ("weights", "means", "scales")]
    return all(np.array_equal(u, v) for u, v in fields) and np.array_equal(
        a.log_likelihood, b.log_likelihood, equal_nan=True
    )


def test_large_means_cost_no_digits():
    """The variance is that about the mean that is sent, which float32 rounds."""
    x, _ = blobs(300, 4, 1)
    far = x.astype(np.float64) * 2**-4 + 2**12
    exact = far.astype(np.float32).astype(float)
    m = one(far, 1, "diag").mixture
    np.testing.assert_allclose(m.scales[0] ** 2, ((exact - m.means) ** 2).mean(0) + floor_of(exact), rtol=1e-5)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_many_rows_lose_no_digits_to_float32(covariance):
    x, start = blobs(30_000, 3, 2, apart=2.0)
    got = one(x, 2, covariance, starts=[start], max_iter=3, tol=0.0)
    assert got.log_likelihood == pytest.approx(textbook(x, start, 2, covariance, floor_of(x), 3)[0][-1], abs=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4"])
def test_types_orders_and_read_only_rows_make_no_difference(dtype):
    x = blobs(60, 8, 3)[0].astype(np.float16)
    expected = one(x.astype(np.float32), 3, "diag")
    turned = np.asfortranarray(x.astype(dtype))
    turned.flags.writeable = False
    before = turned.copy()
    assert same(one(turned, 3, "diag"), expected)
    assert (turned == before).all()


def test_a_start_that_leaves_a_component_empty_lowers_k():
    x, start = blobs(50, 3, 2)
    got, expected = one(x, 5, "diag", starts=[start * 3]), one(x, 2, "diag", starts=[start])
    assert got.mixture.components == 2
    assert same(got, expected)


def test_starts_differ_by_seed_and_find_far_clusters():
    x, _ = blobs(200, 2, 6, apart=0.0)
    a, b, again = fit([x, x, x], [4] * 3, "diag", seeds=[1, 2, 1])
    assert same(a, again)
    assert not same(a, b)
    label = np.arange(300) % 6
    far = (100 * np.eye(6)[label] + np.random.default_rng(0).normal(size=(300, 6))).astype(np.float32)
    for seed in range(20):
        labels = kmeans.start(far, 6, seed, 3)
        assert len(set(zip(labels.tolist(), label.tolist(), strict=True))) == 6


def test_kmeans_ends_where_plain_lloyd_iterations_end():
    """Bounds leave out distances, not changes."""
    x, _ = blobs(300, 5, 4)
    labels, centre = kmeans.start(x, 7, 3, 0), None
    for lloyd in range(1, 6):
        centre = np.stack([x[labels == c].mean(0) for c in range(7)])
        labels = ((x[:, None].astype(float) - centre) ** 2).sum(2).argmin(1)
        assert (kmeans.start(x, 7, 3, lloyd) == labels).mean() > 0.99


def test_em_stops_at_the_largest_number_of_steps():
    x, start = blobs(300, 2, 4, apart=0.5)
    found = one(x, 4, "diag", starts=[start], max_iter=3, tol=1e-9)
    assert (found.iterations, found.converged) == (3, False)
    assert fit([], [], "diag", seeds=[]) == []


X = np.zeros((4, 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"covariance": "tied"}, "tied"),
        ({"groups": [X, np.zeros((4, 3))], "components": [1, 1], "seeds": [0, 0]}, "group 1 has shape"),
        ({"groups": [np.zeros((0, 2))]}, "group 0 has shape"),
        ({"groups": [np.zeros(4)]}, "group 0 has shape"),
        ({"groups": [np.zeros((4, 2), int)]}, "floats"),
        ({"groups": [np.full((4, 2), np.nan)]}, "NaN"),
        ({"groups": [np.array([[0.0, 1], [np.inf, 1]])]}, "infinity"),
        ({"groups": [np.array([[0.0, 1], [1e300, 1]])]}, "beyond 1e"),
        ({"groups": [np.array([[1e20, 1], [1e20, 1]])]}, "beyond 1e"),
        ({"components": [0]}, "at least 1"),
        ({"components": [1, 2]}, "2 components"),
        ({"seeds": []}, "0 seeds"),
        ({"starts": []}, "0 starts"),
        ({"starts": [np.zeros(3, int)]}, "starts of group 0"),
        ({"starts": [np.zeros(4)]}, "starts of group 0"),
        ({"starts": [np.array([0, 1, 2, 0])]}, "run from 0 to 2, expected 0 to 1"),
        ({"starts": [np.array([0, 1, -1, 0])]}, "run from -1"),
        ({"max_iter": 0}, "max_iter"),
        ({"tol": -1.0}, "tol"),
        ({"tol": float("nan")}, "tol"),
    ],
)
def test_invalid_groups_and_settings_are_refused(change, says):
    given = {"groups": [X], "components": [2], "covariance": "diag", "seeds": [0]} | change
    with pytest.raises(ValueError, match=says):
        fit(**given)


def test_importing_the_room_imports_no_compiler():
    code = "import sys, fedfm.methods.fedpft.mixtures; print([m for m in ('numba', 'llvmlite') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
