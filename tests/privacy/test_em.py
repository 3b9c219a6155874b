"""DP-EM: one iteration's sensitivity by search, all iterations' noise by measurement."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from fedfm.errors import InputError
from fedfm.methods.fedpft import private_em
from fedfm.methods.fedpft.noisy_moments import Cell, statistics, to_gaussian, unit_rows
from fedfm.methods.fedpft.private_em import NoisyMixture, iteration, plan_for, release_mixture, responsibilities, start
from fedfm.methods.fedpft.release_plan import COVARIANCES, RELATIONS, Plan
from fedfm.privacy import gaussian
from fedfm.privacy.accountant import together

KEY = b"\5" * 32


def moved(x, mixture, plan):
    """What each single row adds to the released sums: one vector a row, (rows, K (1 + d + ...))."""
    r = responsibilities(x, mixture)
    parts = [np.full((len(x), 1), plan.a), x]
    if plan.covariance == "diag":
        parts.append(x**2)
    if plan.covariance == "full":
        row, column = np.tril_indices(x.shape[1])
        parts.append(x[:, row] * x[:, column] * np.where(row == column, 1.0, math.sqrt(2)))
    return np.einsum("nk,nv->nkv", r, np.hstack(parts)).reshape(len(x), -1)


def random_mixture(rng, k, d, covariance):
    """Blurred ones, and sharp ones whose responsibilities are 0 and 1; separate, or all in one place but one."""
    means = unit_rows(rng.normal(size=(k, d))) * (1.0 if rng.random() < 0.6 else 8.0)
    width = rng.choice([1e-3, 1e-2, 0.3]) * np.ones(k)
    shape = {"spherical": np.ones(k), "diag": np.ones((k, d)), "full": np.tile(np.eye(d), (k, 1, 1))}[covariance]
    scale = width.reshape((k,) + (1,) * (shape.ndim - 1))
    return NoisyMixture(1.0, rng.dirichlet(np.ones(k)), means, shape * scale, rng.choice([0.0, 0.1]) * np.ones(k))


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("a", [0.25, 1.0, 2.0])
def test_the_sensitivity_of_one_iteration(relation, covariance, a):
    """Over random mixtures, all pairs of 240 rows: add/remove |v(x)|, replace |v(x) - v(y)|."""
    rng, plan, d = np.random.default_rng(0), plan_for(Plan(relation, covariance, a=a), 1), 2
    angle = np.linspace(0, 2 * math.pi, 240, endpoint=False)
    x, best = np.stack([np.cos(angle), np.sin(angle)], axis=1), 0.0
    for _ in range(60):
        v = moved(x, random_mixture(rng, int(rng.integers(1, 5)), d, covariance), plan)
        if relation == "add_remove":
            best = max(best, float(np.linalg.norm(v, axis=1).max()))
        else:
            squared = (v**2).sum(axis=1)
            best = max(best, math.sqrt(float((squared[:, None] + squared - 2 * v @ v.T).max())))
    assert best <= plan.sum_sensitivity * (1 + 1e-9)
    assert best >= plan.sum_sensitivity * 0.97
    second = 0 if covariance == "spherical" else 1
    if relation == "add_remove":
        assert plan.sum_sensitivity == pytest.approx(math.sqrt(1 + second + a * a))
    elif not second:
        assert plan.sum_sensitivity == pytest.approx(2.0 if a <= 1 else math.sqrt(2 + 2 * a * a))
    else:
        assert plan.sum_sensitivity == pytest.approx(max(math.sqrt(4.5), math.sqrt(4 + 2 * a * a)))


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_what_a_row_adds_is_what_the_sums_gain(covariance):
    """The vectors that the search moves are the differences of the sums that are released."""
    rng, plan = np.random.default_rng(1), plan_for(Plan(covariance=covariance), 1)
    x, mixture = unit_rows(rng.normal(size=(8, 3))), random_mixture(rng, 3, 3, covariance)
    with_row, without = iteration(x, mixture, plan), iteration(x[1:], mixture, plan)
    weight = np.where(np.equal(*np.tril_indices(3)), 1.0, math.sqrt(2))
    gained = []
    for a, b in zip(with_row, without, strict=True):
        gained += [plan.a * (a.count - b.count), *(a.total - b.total)]
        if a.second is not None:
            gained += [*((a.second - b.second) * (weight if covariance == "full" else 1.0))]
    np.testing.assert_allclose(gained, moved(x[:1], mixture, plan)[0], atol=1e-12)


def test_the_sums_of_the_components_are_the_sums_of_the_class():
    rng, plan = np.random.default_rng(2), Plan(covariance="full")
    x = unit_rows(rng.normal(size=(30, 3)))
    cells, whole = iteration(x, random_mixture(rng, 4, 3, "full"), plan), statistics(x, plan)
    assert sum(c.count for c in cells) == pytest.approx(30)
    np.testing.assert_allclose(sum(c.total for c in cells), whole.total)
    np.testing.assert_allclose(sum(c.second for c in cells), whole.second)


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_responsibilities_are_bayes_rule(covariance):
    rng, d = np.random.default_rng(3), 3
    x, m = unit_rows(rng.normal(size=(20, d))), random_mixture(rng, 3, d, covariance)
    m = dataclasses.replace(m, variances=m.variances + (0.2 * np.eye(d) if covariance == "full" else 0.2))
    full = [v if np.ndim(v) == 2 else np.diag(np.broadcast_to(v, (d,))) for v in m.variances]
    joint = [
        w * stats.multivariate_normal(mean, v + s * np.eye(d)).pdf(x)
        for w, mean, v, s in zip(m.weights, m.means, full, m.noise, strict=True)
    ]
    np.testing.assert_allclose(responsibilities(x, m), np.transpose(joint) / np.sum(joint, axis=0)[:, None], rtol=1e-9)


def test_rows_far_from_every_component_still_belong_somewhere():
    sharp = NoisyMixture(1.0, np.array([0.5, 0.5]), np.array([[1.0, 0.0], [0.9, 0.1]]), np.full(2, 1e-4), np.zeros(2))
    r = responsibilities(np.array([[-1.0, 0.0], [0.0, 1.0]]), sharp)
    np.testing.assert_allclose(r.sum(axis=1), 1)
    assert np.isfinite(r).all()


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("components", "iterations"), [(1, 1), (3, 4)])
def test_every_iteration_carries_its_share_of_the_noise(monkeypatch, relation, components, iterations):
    x, plan, seen = unit_rows(np.random.default_rng(0).normal(size=(60, 3))), Plan(relation, epsilon=2.0), []
    original = private_em.noised

    def spy(exact, spent, key, purpose, **rest):
        cell = original(exact, spent, key, purpose, **rest)
        seen.append([plan.a * (cell.count - exact.count), *(cell.total - exact.total)])
        return cell

    monkeypatch.setattr(private_em, "noised", spy)
    runs = 720 // (components * iterations)
    for i in range(runs):
        release_mixture(x, plan, i.to_bytes(32, "big"), "c", components=components, iterations=iterations)
    noise = np.array(seen)
    assert noise.shape == (runs * components * iterations, 4)  # nothing else is looked at
    delta = math.sqrt(1 + plan.a**2) if relation == "add_remove" else 2.0
    sigma = delta * math.sqrt(iterations) * gaussian.sigma_for(2.0, 1e-5)
    assert stats.kstest(noise.ravel() / sigma, "norm").pvalue > 0.005
    np.testing.assert_allclose(np.cov(noise.T) / sigma**2, np.eye(4), atol=5.5 / math.sqrt(len(noise)))
    per_run = noise.reshape(runs, -1)  # independent over components and iterations
    if per_run.shape[1] > 4:
        off = np.corrcoef(per_run.T) - np.eye(per_run.shape[1])
        assert np.abs(off).max() < 5 / math.sqrt(runs)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_iterations_together_cost_what_is_claimed(relation):
    plan = plan_for(Plan(relation, epsilon=3.0), 7)
    one = dataclasses.replace(plan.spent(), sensitivity=plan.sum_sensitivity)
    assert together([one] * 7).epsilon == pytest.approx(3.0, rel=1e-6)
    assert plan.spent().epsilon == 3.0
    assert "7 adaptive iterations" in plan.spent().composition


def test_the_start_looks_at_no_data(monkeypatch):
    seen = []
    original = private_em.responsibilities
    monkeypatch.setattr(private_em, "responsibilities", lambda x, m: seen.append(m) or original(x, m))
    for seed in (0, 1):
        x = unit_rows(np.random.default_rng(seed).normal(size=(50 + seed, 6)))
        release_mixture(x, Plan(), KEY, "c", components=3, iterations=1)
    assert np.array_equal(seen[0].means, seen[1].means)
    np.testing.assert_allclose(np.linalg.norm(start(3, 6, "full").means, axis=1), 1)
    assert start(3, 6, "full").variances.shape == (3, 6, 6)


def clusters(n, k, d, seed=0):
    rng = np.random.default_rng(seed)
    centres = unit_rows(rng.normal(size=(k, d)))
    label = rng.integers(0, k, n)
    return unit_rows(0.9 * centres[label] + 0.3 / math.sqrt(d) * rng.normal(size=(n, d))), centres


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_it_finds_clusters_where_the_noise_lets_it(relation, covariance):
    x, centres = clusters(6000, 3, 16)
    plan = Plan(relation, covariance, epsilon=20.0)
    found = release_mixture(x, plan, KEY, "c", components=6, iterations=6)
    near = (unit_rows(found.means) @ centres.T).max(axis=0)
    if covariance != "full":  # a wide component may cover two clusters and stay there, with or without noise
        assert near.min() > 0.98
    np.testing.assert_allclose(found.weights @ found.means, x.mean(axis=0), atol=0.02)
    assert found.count == pytest.approx(6000, rel=0.02)
    assert found.weights.sum() == pytest.approx(1)
    assert found.means.shape[1:] == (16,)
    assert found.variances.shape[0] == len(found.weights) <= 6
    if covariance == "full":
        for v in found.variances:
            np.linalg.cholesky(v)
    if relation == "replace":
        assert found.count == 6000  # public


def test_the_same_bits_twice_and_fresh_noise_for_other_rows_or_plans():
    x, _ = clusters(800, 3, 8)
    plan = Plan(epsilon=5.0)
    a, b = (release_mixture(x, plan, KEY, "c", components=3) for _ in range(2))
    assert np.array_equal(a.means, b.means)
    for other in (
        release_mixture(x[1:], plan, KEY, "c", components=3),
        release_mixture(x, Plan(epsilon=5.001), KEY, "c", components=3),
        release_mixture(x, plan, KEY, "d", components=3),
    ):
        assert abs(other.count - a.count) > 1e-3


def test_one_component_and_one_iteration_is_the_plain_release():
    x, _ = clusters(500, 1, 8)
    plan = Plan(epsilon=5.0)
    found = release_mixture(x, plan, KEY, "c", components=1, iterations=1)
    assert plan_for(plan, 1) == plan
    assert plan_for(plan, 1).sigma(1) == plan.sigma(1)
    cell = Cell(found.count, found.means[0] * found.count)
    assert found.variances[0] == pytest.approx(to_gaussian(cell, plan, 8)[2])


def test_weak_components_are_pooled():
    plan, d = plan_for(Plan(), 1), 4
    least, sigma = 2 * plan.count_sigma, plan.sum_sigma(1)
    weak = [Cell(least * 0.9, np.full(d, 5.0)), Cell(least * 0.8, np.full(d, 3.0))]
    strong = Cell(least * 3, np.full(d, 10.0))
    found = private_em.maximise([strong, *weak], plan)
    assert found.count == pytest.approx(least * 4.7)
    np.testing.assert_allclose(found.weights, [3 / 4.7, 1.7 / 4.7])
    np.testing.assert_allclose(found.means[1], 8 / (1.7 * least))
    np.testing.assert_allclose(found.noise, [(sigma / (3 * least)) ** 2, 2 * (sigma / (1.7 * least)) ** 2])
    assert private_em.maximise([weak[0], Cell(-least, np.zeros(d))], plan) is None
    assert len(private_em.maximise([strong, Cell(-1.0, np.zeros(d))], plan).weights) == 1


def test_an_empty_class_gives_nothing_or_noise_but_no_failure():
    empty = [
        release_mixture(np.zeros((0, 4)), Plan(), i.to_bytes(32, "big"), "c", components=3, iterations=2)
        for i in range(40)
    ]
    assert sum(m is None for m in empty) > 30
    with pytest.raises(InputError, match="leave it out"):
        release_mixture(np.zeros((0, 4)), Plan("replace"), KEY, "c", components=3)


def test_the_heaviest_component_is_split():
    m = NoisyMixture(9.0, np.array([0.2, 0.8]), np.eye(2, 3), np.array([0.1, 0.2]), np.array([0.0, 0.5]))
    s = private_em.spread(m, 5, 0)
    np.testing.assert_allclose(s.weights, [0.2, 0.2, 0.2, 0.2, 0.2])
    np.testing.assert_array_equal(s.variances, [0.1, 0.2, 0.2, 0.2, 0.2])
    assert len(np.unique(s.means, axis=0)) == 5
    assert private_em.spread(m, 2, 0) is m


@pytest.mark.parametrize(
    ("plan", "options", "said"),
    [
        (Plan(), {"components": 0}, "components is 0"),
        (Plan(), {"components": 2, "iterations": 0}, "iterations = 0"),
        (Plan("replace", calibration="paper"), {"components": 2}, "calibration 'analytic'"),
    ],
)
def test_what_cannot_be_accounted_is_refused(plan, options, said):
    with pytest.raises(InputError, match=said):
        release_mixture(np.eye(4), plan, KEY, "c", **options)
