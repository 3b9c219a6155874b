"""The moments that a client releases under privacy, and the server's use of them."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from fedfm.errors import ClientFault, InputError
from fedfm.methods.fedpft.noisy_moments import Cell, release, statistics, to_gaussian
from fedfm.methods.fedpft.release_plan import COVARIANCES, RELATIONS, Plan
from fedfm.privacy import gaussian, noise
from fedfm.privacy.noise import project, unit_rows

KEY = b"\7" * 32
PLANS = [Plan(relation, covariance) for relation in RELATIONS for covariance in COVARIANCES]
names = [f"{p.relation}-{p.covariance}" for p in PLANS]


def rows(n, d=4, seed=0, spread=0.5):
    rng = np.random.default_rng(seed)
    return unit_rows(rng.normal(size=(1, d)) + spread * rng.normal(size=(n, d)))


def keys(count):
    return [i.to_bytes(32, "little") for i in range(count)]


def white(cell, plan):
    """The numbers of a cell on which the noise has one standard deviation."""
    d, out = len(cell.total), [cell.total]
    if not plan.counts_public:
        out.append([plan.a * cell.count])
    if cell.second is not None:
        row, column = np.tril_indices(d)
        full = plan.covariance == "full"
        out.append(cell.second * (np.where(row == column, 1.0, math.sqrt(2)) if full else 1.0))
    return np.concatenate(out)


# ---- unit rows


def test_every_row_gets_norm_one():
    x = np.array([[3.0, 4.0], [0.0, 0.0], [-0.0, 0.0], [1e-320, 0.0], [1e300, 1e300], [0.0, -5e-324]])
    unit = unit_rows(x)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-15)
    half = math.sqrt(0.5)
    np.testing.assert_allclose(unit, [[0.6, 0.8], [1, 0], [1, 0], [1, 0], [half, half], [0, -1]], rtol=1e-15)
    assert x[0, 0] == 3  # the argument is left as it was
    assert unit_rows(np.zeros((0, 3))).shape == (0, 3)
    assert unit_rows(np.ones((2, 3), np.float32)).dtype == np.float64


@pytest.mark.parametrize("x", [np.zeros(3), np.zeros((2, 0)), np.array([[math.nan, 1]]), np.array([[math.inf, 1]])])
def test_rows_without_a_norm_are_refused(x):
    with pytest.raises(InputError, match="features"):
        unit_rows(x)


# ---- release


@pytest.mark.sample("replace_any-full", "add_remove-diag", "replace-spherical")
@pytest.mark.parametrize("plan", PLANS, ids=names)
def test_the_noise_has_the_plans_law(plan):
    x, count = rows(20, 3), 900
    exact = white(statistics(x, plan), plan)
    noises = np.array([white(release(x, plan, key, "c"), plan) for key in keys(count)]) - exact
    sigma = plan.sum_sigma(20)
    assert stats.kstest(noises.ravel() / sigma, "norm").pvalue > 0.005
    np.testing.assert_allclose(np.cov(noises.T) / sigma**2, np.eye(len(exact)), atol=5.5 / math.sqrt(count))


def worst_pair(plan):
    """Neighbours at the bound: a row leaves, turns round, or moves to cosine -1/2."""
    base = rows(9, 2)
    x, angle = base[:1], math.radians(120)
    if plan.covariance == "diag":
        x = np.array([[math.cos(math.radians(-15)), math.sin(math.radians(-15))]])
        y = x[:, ::-1]
    elif plan.covariance == "full":
        y = x @ np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    else:
        y = -x
    if plan.covariance == "diag" and plan.relation == "add_remove":
        x = np.eye(2)[:1]
    return np.vstack([base, x]), base if plan.relation == "add_remove" else np.vstack([base, y])


@pytest.mark.sample("replace_any-full", "add_remove-diag", "replace-spherical")
@pytest.mark.parametrize("plan", [dataclasses.replace(p, epsilon=4.0) for p in PLANS], ids=names)
def test_an_attack_measures_the_epsilon_that_is_claimed(plan):
    """The likelihood ratio of 1,000 releases each of two neighbours: an audit of noise and sensitivity together.

    A factor sqrt(2) too little noise would give epsilon 5.7; the interval is four standard errors wide.
    """
    one, other = worst_pair(plan)
    step = white(statistics(one, plan), plan) - white(statistics(other, plan), plan)
    step /= np.linalg.norm(step)
    half = keys(2000)
    a = np.array([white(release(one, plan, key, "c"), plan) for key in half[:1000]]) @ step
    b = np.array([white(release(other, plan, key, "c"), plan) for key in half[1000:]]) @ step
    mu = (a.mean() - b.mean()) / math.sqrt(0.5 * (a.var() + b.var()))
    error = 4 * math.sqrt(2 / 1000)
    assert gaussian.epsilon_of(1.0, mu - error, 1e-5) < 4.0 < gaussian.epsilon_of(1.0, mu + error, 1e-5)
    assert gaussian.epsilon_of(1.0, mu, 1e-5) == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize("plan", PLANS, ids=names)
def test_a_release_repeated_has_the_same_bits(plan):
    a, b = (release(rows(20), plan, KEY, "c3/moments/7") for _ in range(2))
    assert a.count == b.count
    assert np.array_equal(a.total, b.total)
    assert a.second is b.second is None or np.array_equal(a.second, b.second)


def test_no_two_releases_share_noise():
    """Their difference would show a row: by purpose, key, plan, and the rows themselves."""
    x, plan = rows(20), Plan("replace", "full")
    exact = statistics(x, plan).total
    drawn = [release(x, plan, KEY, "c").total - exact, release(x, plan, KEY, "d").total - exact]
    drawn.append(release(x, plan, b"\6" * 32, "c").total - exact)
    drawn.append(release(x, Plan("replace", "full", epsilon=2.0), KEY, "c").total - exact)
    drawn.append(release(x, Plan("replace"), KEY, "c").total - exact)
    drawn.append(release(x[1:], plan, KEY, "c").total - statistics(x[1:], plan).total)  # a row was withdrawn
    drawn.append(release(x[::-1], plan, KEY, "c").total - exact)
    unit = np.array([v / np.linalg.norm(v) for v in drawn])
    assert np.abs(np.triu(unit @ unit.T, 1)).max() < 1 - 1e-6
    second = release(x, plan, KEY, "c")
    assert not np.isin(np.round((second.second - statistics(x, plan).second), 6), np.round(drawn[0], 6)).any()


@pytest.mark.each_value
@pytest.mark.parametrize("relation", ["add_remove", "replace_any"])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_no_exact_count_leaves(relation, covariance):
    plan = Plan(relation, covariance)
    counts = np.array([release(rows(20), plan, key, "c").count for key in keys(400)])
    assert counts.std() == pytest.approx(plan.count_sigma, rel=0.15)
    assert len(set(counts)) == 400
    empty = release(np.zeros((0, 4)), plan, KEY, "c")  # an empty class sends a cell like any other
    assert empty.count != 0
    assert np.all(empty.total != 0)
    assert set(vars(empty)) == {"count", "total", "second"}


def test_under_replace_counts_are_public_and_an_empty_class_is_left_out():
    assert release(rows(20), Plan("replace"), KEY, "c").count == 20
    with pytest.raises(InputError, match="leave that class out"):
        release(np.zeros((0, 4)), Plan("replace"), KEY, "c")


def test_statistics_by_hand():
    x = np.array([[0.6, 0.8], [1.0, 0.0]])
    assert statistics(x, Plan()).second is None
    np.testing.assert_allclose(statistics(x, Plan()).total, [1.6, 0.8])
    np.testing.assert_allclose(statistics(x, Plan(covariance="diag")).second, [1.36, 0.64])
    np.testing.assert_allclose(statistics(x, Plan(covariance="full")).second, [1.36, 0.48, 0.64])


def test_rows_of_another_norm_are_refused():
    for x in (2 * rows(3), 0.999 * rows(3), np.zeros((1, 3)), np.full((1, 3), math.nan)):
        with pytest.raises(InputError, match="unit_rows"):
            release(x, Plan(), KEY, "c")
    with pytest.raises(InputError, match="shape"):
        release(np.ones(3), Plan(), KEY, "c")
    release(rows(3).astype(np.float32), Plan(), KEY, "c")  # norms are 1 up to rounding


def test_the_clients_rows_decide_the_noise_of_the_papers_other_reading():
    plan, x = Plan("replace", calibration="paper_client"), rows(20, 192)
    cell = release(x, plan, KEY, "c", client_rows=2000)
    assert (cell.total / 20 - x.mean(0)).std() == pytest.approx(0.0160619, rel=0.2)
    assert to_gaussian(cell, plan, 192, client_rows=2000) is not None
    with pytest.raises(InputError, match="client_rows"):
        release(x, plan, KEY, "c")


# ---- the server


def test_a_spherical_variance_by_hand():
    plan, d, n = Plan("replace", epsilon=2.0), 3, 50
    total = np.array([20.0, -10.0, 5.0])
    count, mean, variance = to_gaussian(Cell(n, total), plan, d)
    sigma = 2 / n * gaussian.sigma_for(2.0, 1e-5)
    assert count == n
    np.testing.assert_allclose(mean, total / n)
    assert variance == pytest.approx(min((1 - np.sum((total / n) ** 2) + d * sigma**2) / d, 1 / d))
    assert 1e-4 < variance < 1 / d
    assert to_gaussian(Cell(n, np.zeros(d)), plan, d)[2] == pytest.approx(1 / d)  # at most
    assert to_gaussian(Cell(n, 9 * total), plan, d)[2] == 1e-4  # at least
    # Two rows (1, 0) and (0, 1): (1 - 1/2) / 2.
    quiet = Plan("replace", epsilon=1e7)
    assert to_gaussian(Cell(2, np.ones(2)), quiet, 2)[2] == pytest.approx(0.25, rel=1e-3)


def test_a_noisy_count_scales_mean_and_noise():
    plan, n, d = Plan(), 400.5, 4
    total = np.array([200.0, 100.0, 0.0, 0.0])
    count, mean, variance = to_gaussian(Cell(n, total), plan, d)
    assert count == n
    np.testing.assert_allclose(mean, total / n)
    assert variance == pytest.approx((1 - mean @ mean + d * (3.8454 / n) ** 2) / d, rel=1e-6)


def test_a_count_that_does_not_stand_out_of_its_noise_is_none():
    for relation in ("add_remove", "replace_any"):
        plan = Plan(relation)
        least = 2 * plan.sigma(1) / plan.a
        assert to_gaussian(Cell(least * 0.999, np.zeros(4)), plan, 4) is None
        assert to_gaussian(Cell(least * 1.001, np.zeros(4)), plan, 4) is not None
        assert to_gaussian(Cell(-50.0, np.zeros(4)), plan, 4) is None
    assert 2 * Plan().sigma(1) / Plan().a == pytest.approx(30.764, abs=5e-4)
    assert to_gaussian(Cell(1, np.zeros(4)), Plan("replace"), 4) is not None


@pytest.mark.parametrize("plan", [dataclasses.replace(p, epsilon=1e7) for p in PLANS], ids=names)
def test_without_noise_the_moments_are_those_of_the_rows(plan):
    x = rows(500, 5)
    count, mean, variance = to_gaussian(release(x, plan, KEY, "c"), plan, 5)
    true = np.cov(x.T, bias=True)
    assert count == pytest.approx(500, rel=1e-3)
    np.testing.assert_allclose(mean, x.mean(0), atol=1e-3)
    expected = {"spherical": np.trace(true) / 5, "diag": np.diag(true), "full": true}[plan.covariance]
    np.testing.assert_allclose(variance, expected, atol=1e-3)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("plan", PLANS, ids=names)
def test_whatever_the_noise_a_normal_distribution_comes_out(plan, epsilon):
    plan, d = dataclasses.replace(plan, epsilon=epsilon), 12
    for n, seed in [(1, 0), (40, 1), (3000, 2)]:
        found = to_gaussian(release(rows(n, d, seed), plan, KEY, "c"), plan, d)
        if found is None:
            continue
        count, mean, variance = found
        inflated = d * (plan.sum_sigma(n) / count) ** 2
        level = np.clip((1 - mean @ mean + inflated) / d, 1e-4, 1 / d)
        if plan.covariance == "spherical":
            assert variance == pytest.approx(level)
        elif plan.covariance == "diag":
            assert variance.sum() == pytest.approx(d * level)  # the trace that unit rows have
            assert variance.min() > 0
        else:
            assert np.trace(variance) == pytest.approx(d * level)
            assert np.array_equal(variance, variance.T)
            np.linalg.cholesky(variance)


def test_projection():
    rng = np.random.default_rng(0)
    for d in (1, 2, 7):
        matrix = rng.normal(size=(d, d))
        near, sym = project(matrix, 0.1), 0.5 * (matrix + matrix.T)
        assert np.linalg.eigvalsh(near).min() == pytest.approx(0.1) or np.linalg.eigvalsh(sym).min() > 0.1
        assert np.array_equal(near, near.T)
        np.testing.assert_allclose(project(near, 0.1), near, atol=1e-12)
        for _ in range(200):  # none of the allowed matrices is nearer
            z = rng.normal(size=(d, d))
            other = near + 0.1 * (z @ z.T) if rng.random() < 0.5 else project(near + 0.1 * z, 0.1)
            assert np.linalg.norm(sym - near) <= np.linalg.norm(sym - other) + 1e-12
    np.testing.assert_allclose(project(np.array([[1.0, 0.0], [0.0, -3.0]]), 0.25), np.diag([1.0, 0.25]))


def test_the_mean_is_unbiased_and_the_trace_takes_its_noise_out():
    plan, n, d = Plan("replace"), 300, 24
    x = rows(n, d, spread=1.5)
    found = [to_gaussian(release(x, plan, key, "c"), plan, d) for key in keys(500)]
    means, levels = np.array([m for _, m, _ in found]), np.array([v for _, _, v in found])
    sigma = plan.sigma(n)
    assert np.abs(means.mean(0) - x.mean(0)).max() < 5 * sigma / math.sqrt(500)
    true = (1 - np.sum(x.mean(0) ** 2)) / d
    assert abs(levels.mean() - true) < 5 * levels.std() / math.sqrt(500)
    raw = np.mean([(1 - m @ m) / d for m in means])
    assert raw == pytest.approx(true - sigma**2, rel=0.01)  # what it corrects


@pytest.mark.parametrize(
    ("plan", "cell", "code"),
    [
        (Plan(), Cell(50.0, np.zeros(3)), "E_SHAPE"),
        (Plan(), Cell(50.0, np.zeros((4, 1))), "E_SHAPE"),
        (Plan(), Cell(50.0, np.zeros(4), np.zeros(10)), "E_SHAPE"),
        (Plan(covariance="full"), Cell(50.0, np.zeros(4)), "E_SHAPE"),
        (Plan(covariance="full"), Cell(50.0, np.zeros(4), np.zeros(16)), "E_SHAPE"),
        (Plan(covariance="diag"), Cell(50.0, np.zeros(4), np.zeros(10)), "E_SHAPE"),
        (Plan(), Cell(math.nan, np.zeros(4)), "E_NONFINITE"),
        (Plan(), Cell(50.0, np.full(4, math.inf)), "E_NONFINITE"),
        (Plan(covariance="full"), Cell(50.0, np.zeros(4), np.full(10, math.nan)), "E_NONFINITE"),
        (Plan("replace"), Cell(0, np.zeros(4)), "E_WEIGHT"),
        (Plan("replace"), Cell(-3, np.zeros(4)), "E_WEIGHT"),
        (Plan("replace"), Cell(2.5, np.zeros(4)), "E_WEIGHT"),
    ],
)
def test_a_cell_that_no_client_makes_is_a_clients_fault(plan, cell, code):
    with pytest.raises(ClientFault, match=code):
        to_gaussian(cell, plan, 4)


def test_full_noise_drowns_a_covariance_as_computed():
    """Frobenius norm of the noise, sigma sqrt(d (d + 1) / 2): 1.2 at n = 900, d = 192, epsilon = 1."""
    sigma = Plan("replace", "full").sigma(900)
    assert sigma * math.sqrt(192 * 193 / 2) == pytest.approx(1.2, abs=0.03)
    zeros = np.zeros(192 * 193 // 2)
    drawn = np.linalg.norm(sigma * noise.unpack(noise.cover(KEY, "frobenius", zeros, noise.packed_scale(192)), 192))
    assert drawn == pytest.approx(1.2, abs=0.05)
