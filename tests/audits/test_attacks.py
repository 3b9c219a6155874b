"""The attack algorithms against independent computation and closed cases."""

import math

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score, roc_curve

from fedfm.audits.inference import copies, inverter, likelihood_ratio, one_run, rates, similarity
from fedfm.methods.fedpft.mixtures import fit


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 300), (400, 90)])
def test_auc_and_tpr_are_those_of_scikit_learn(n, m, ties):
    rng = np.random.default_rng(n + m)
    a, b = rng.normal(0.7, 1, n), rng.normal(0, 1, m)
    if ties:
        a, b = a.round(), b.round()
    truth, scores = np.r_[np.ones(n), np.zeros(m)], np.r_[a, b]
    assert rates.auc(a, b) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    threshold = rates.threshold_at(b, 0.01)
    alarms, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    assert (b > threshold).mean() <= 0.01
    assert (a > threshold).mean() == pytest.approx(tpr[alarms <= 0.01].max())


def test_an_empty_side_has_no_auc():
    with pytest.raises(ValueError, match="0 positives"):
        rates.auc(np.zeros(0), np.ones(3))


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (1, 1), (0, 50), (3, 50), (50, 50), (17, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.999])
def test_clopper_pearson_is_scipys(hits, trials, confidence):
    ours = rates.clopper_pearson(hits, trials, confidence)
    theirs = stats.binomtest(hits, trials).proportion_ci(confidence, method="exact")
    assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_clopper_pearson_refuses_more_hits_than_trials():
    with pytest.raises(ValueError, match="3 hits of 2"):
        rates.clopper_pearson(3, 2)


def test_the_bootstrap_covers_a_mean_of_parts():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        parts, weights = rng.normal(0.6, 0.1, 40), rng.integers(1, 50, 40)
        low, high = rates.bootstrap(parts, weights, rng)
        covered += low <= 0.6 <= high
    assert covered >= 85


def test_hanley_mcneil_is_the_spread_of_an_auc():
    rng = np.random.default_rng(1)
    drawn = [rates.auc(rng.normal(1, 1, 60), rng.normal(0, 1, 80)) for _ in range(800)]
    assert rates.auc_error(float(np.mean(drawn)), 60, 80) == pytest.approx(np.std(drawn), rel=0.15)


# --- likelihood ratio -------------------------------------------------------------------------------------------------


def ratio_auc(n: int, covariance: str, components: int, repeats: int = 12, d: int = 30) -> float:
    """Mixtures of n standard normal rows, shadows of 600 others."""
    rng = np.random.default_rng(n)
    found = []
    for seed in range(repeats):
        own, other, held = (rng.normal(size=(m, d)).astype(np.float32) for m in (n, 600, 200))
        k = min(components, n)
        g, shadow = (f.mixture for f in fit([own, other], [k, k], covariance, seeds=[seed, seed]))
        a, b = (likelihood_ratio.scores(x, g, shadow) for x in (own, held))
        found.append(rates.auc(a, b))
    return float(np.mean(found))


def test_membership_falls_with_the_rows_of_a_class():
    """The mean score of a member is d/n above that of a stranger, and both variances are about d/n.

    So the AUC is near Phi(sqrt(d / 2 n)): 0.89 at n = 10 and 0.61 at n = 200 for d = 30.
    """
    by_n = {n: ratio_auc(n, "spherical", 1) for n in (10, 50, 200)}
    assert by_n[10] == pytest.approx(0.89, abs=0.05)
    assert by_n[200] == pytest.approx(0.61, abs=0.04)
    assert by_n[10] > by_n[50] + 0.05 > by_n[200] + 0.1


@pytest.mark.proof
def test_more_parameters_tell_more():
    spherical, diag, several = (ratio_auc(20, c, k) for c, k in (("spherical", 1), ("diag", 1), ("diag", 10)))
    assert spherical < diag - 0.03 < several - 0.05
    assert several > 0.98


def test_a_density_that_vanishes_gives_a_finite_score():
    class Nowhere:
        def log_prob(self, x):
            return np.full(len(x), -np.inf)

    assert np.isfinite(likelihood_ratio.scores(np.zeros((2, 1)), Nowhere(), Nowhere())).all()


# --- epsilon from one run ---------------------------------------------------------------------------------------------


def p_value_by_loop(m, r, v, eps, delta):
    """Steinke, Nasr, Jagielski 2023, Appendix D, as printed there."""
    q = 1 / (1 + math.exp(-eps))
    beta = stats.binom.sf(v - 1, r, q)
    alpha = total = 0.0
    for i in range(1, v + 1):
        total += stats.binom.pmf(v - i, r, q)
        alpha = max(alpha, total / i)
    return min(beta + alpha * delta * 2 * m, 1)


@pytest.mark.parametrize(("m", "r", "v"), [(10, 10, 10), (100, 60, 41), (1000, 50, 49), (30, 30, 1)])
@pytest.mark.parametrize(("eps", "delta"), [(0.0, 0.0), (1.0, 1e-5), (3.0, 1e-2)])
def test_p_value_is_the_printed_one(m, r, v, eps, delta):
    assert one_run.p_value(m, r, v, eps, delta) == pytest.approx(p_value_by_loop(m, r, v, eps, delta), abs=1e-12)


def test_p_value_of_nothing():
    assert one_run.p_value(5, 5, 0, 1.0, 0.0) == 1.0
    assert one_run.p_value(5, 5, 5, math.inf, 0.0) == 1.0
    with pytest.raises(ValueError, match="6 right of 5"):
        one_run.p_value(9, 5, 6, 1.0, 0.0)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_randomised_response_is_bounded_from_below_and_never_refuted(epsilon):
    rng = np.random.default_rng(2)
    keep = 1 / (1 + math.exp(-epsilon))
    bounds = []
    for _ in range(30):
        guesses = np.where(rng.random(1000) < keep, 1.0, -1.0)
        bounds.append(one_run.epsilon_bound(guesses.tolist(), 0.0))
    assert np.mean(np.array(bounds) > epsilon) <= 0.07
    assert np.median(bounds) > epsilon - 0.35


def test_a_bound_of_two_steps_is_about_half():
    right = [1.0] * 900 + [-1.0] * 100
    once, twice = (one_run.epsilon_bound(right, 0.0, steps=s) for s in (1, 2))
    assert twice == pytest.approx(once / 2, rel=1e-6)
    assert one_run.epsilon_bound([], 0.0) == 0.0
    assert one_run.epsilon_bound([0.0] * 500, 0.0) == 0.0  # no reading, no right guess


def test_largest_auc_is_the_area_above_the_trade_off_curve():
    a = np.linspace(0, 1, 200_001)
    for epsilon, delta in [(0.5, 0.0), (1.0, 0.01), (4.0, 1e-5)]:
        f = np.maximum(0, np.maximum(1 - delta - math.exp(epsilon) * a, math.exp(-epsilon) * (1 - delta - a)))
        assert one_run.largest_auc(epsilon, delta) == pytest.approx(1 - np.trapezoid(f, a), abs=1e-6)


# --- coins ------------------------------------------------------------------------------------------------------------


def test_exact_sums_give_all_coins_away():
    rng = np.random.default_rng(3)
    used, unused, rest = (rng.normal(size=(m, 20)) for m in (12, 12, 100))
    total = used.sum(0) + rest.sum(0)
    found = one_run.readings(total, rest.sum(0), used, unused, 0.0)
    np.testing.assert_allclose(found, 1.0, atol=1e-6)
    swapped = one_run.readings(total, rest.sum(0), unused, used, 0.0)
    np.testing.assert_allclose(swapped, -found, atol=1e-9)


def test_noise_hides_coins_and_more_pairs_than_dimensions_do_no_harm():
    rng = np.random.default_rng(4)
    right = {}
    for sigma in (0.1, 1000.0):
        hits = []
        for _ in range(60):
            used, unused = rng.normal(size=(30, 10)), rng.normal(size=(30, 10))
            total = used.sum(0) + sigma * rng.normal(size=10)
            hits += (one_run.readings(total, np.zeros(10), used, unused, sigma) > 0).tolist()
        right[sigma] = np.mean(hits)
    assert right[0.1] > 0.65
    assert right[1000.0] == pytest.approx(0.5, abs=0.05)


# --- copies -----------------------------------------------------------------------------------------------------------


def test_nearest_keeps_the_digits_of_small_distances():
    rows = np.array([[1e3, 0.0], [1e3 + 3, 4.0]])
    index, distance = copies.nearest(np.array([[1e3, 1e-6], [1e3, 5.0]]), rows)
    assert index.tolist() == [0, 1]
    np.testing.assert_allclose(distance, [1e-6, np.sqrt(10)], rtol=1e-9)
    assert copies.nearest(np.zeros((1, 2)), np.zeros((0, 2)))[1].tolist() == [np.inf]


def test_typical_gap_is_a_median_over_rows_that_differ():
    rows = np.array([[0.0], [1.0], [1.0], [3.0], [7.0]])
    assert copies.typical_gap(rows) == 1.5  # 1, 1, 2, 4
    assert copies.typical_gap(np.ones((4, 2))) == 0.0


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_psnr_and_ssim_in_closed_cases():
    rng = np.random.default_rng(5)
    a = rng.random((12, 15, 3))
    assert similarity.psnr(a, a) == np.inf
    assert similarity.ssim(a, a) == pytest.approx(1.0)
    x, y = np.full((9, 9, 3), 0.2), np.full((9, 9, 3), 0.7)
    assert similarity.psnr(x, y) == pytest.approx(-20 * math.log10(0.5))
    c1 = 0.01**2
    assert similarity.ssim(x, y) == pytest.approx((2 * 0.2 * 0.7 + c1) / (0.2**2 + 0.7**2 + c1))
    assert similarity.ssim(a, 1 - a) < 0
    with pytest.raises(ValueError, match="smaller than a window"):
        similarity.ssim(np.zeros((5, 9, 3)), np.zeros((5, 9, 3)))


def test_ssim_is_the_mean_over_windows():
    rng = np.random.default_rng(6)
    a, b = rng.random((2, 10, 9, 3))
    luma = np.array([0.299, 0.587, 0.114])
    values = []
    for i in range(10 - 6):
        for j in range(9 - 6):
            x, y = ((p @ luma)[i : i + 7, j : j + 7].ravel() for p in (a, b))
            cov = np.cov(x, y, bias=True)
            top = (2 * x.mean() * y.mean() + 1e-4) * (2 * cov[0, 1] + 9e-4)
            values.append(top / ((x.mean() ** 2 + y.mean() ** 2 + 1e-4) * (cov[0, 0] + cov[1, 1] + 9e-4)))
    assert similarity.ssim(a, b) == pytest.approx(np.mean(values))
    many = similarity.ssim(np.stack([a, b]), b[None])
    assert many.shape == (2,)
    assert many[1] == pytest.approx(1.0)


@pytest.mark.proof
def test_an_inverter_learns_what_features_say_and_is_the_same_every_time():
    rng = np.random.default_rng(7)
    features = rng.normal(size=(200, 4)).astype(np.float32)
    colour = 1 / (1 + np.exp(-features[:, :3]))
    pictures = np.broadcast_to(colour[:, None, None], (200, 32, 32, 3)).astype(np.float32)
    short = [inverter.train(features[:150], pictures[:150], seed=1, steps=3)(features[150:]) for _ in range(2)]
    np.testing.assert_array_equal(*short)
    painted = inverter.train(features[:150], pictures[:150], seed=1, steps=40)(features[150:])
    assert painted.shape == (50, 32, 32, 3)
    error = ((painted - pictures[150:]) ** 2).mean()
    assert error < 0.4 * ((pictures[:150].mean(0) - pictures[150:]) ** 2).mean()
