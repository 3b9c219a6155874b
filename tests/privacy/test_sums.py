"""One noisy sum over the federation: it needs a mean, and has the noise of one client."""

import math

import numpy as np
import pytest

from fedfm.errors import InputError
from fedfm.methods.fedpft.noisy_moments import statistics, to_gaussian
from fedfm.methods.fedpft.noisy_sums import client_sums, federation_sum, width
from fedfm.methods.fedpft.release_plan import COVARIANCES, RELATIONS, Plan
from fedfm.privacy.noise import unit_rows

KEY = b"\3" * 32
D, CLASSES = 5, 4


def federation(clients=6, n=200, seed=0):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLASSES - 1, D))
    for _ in range(clients):
        labels = rng.integers(0, CLASSES - 1, n)  # nobody has the last class
        yield unit_rows(centres[labels] + 0.3 * rng.normal(size=(n, D))), labels


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_mean_of_the_clients_sums_is_all_it_needs(relation, covariance):
    plan = Plan(relation, covariance, epsilon=1e7)
    clients = list(federation())
    sums = [client_sums(x, y, CLASSES, plan) for x, y in clients]
    assert all(s.shape == (CLASSES, width(plan, D)) for s in sums)
    cells = federation_sum(np.mean(sums, axis=0), len(sums), plan, D, KEY, "sum")
    assert set(cells) == set(range(CLASSES if relation != "replace" else CLASSES - 1))
    x, y = (np.concatenate(parts) for parts in zip(*clients, strict=True))
    for c, cell in cells.items():
        pooled = statistics(x[y == c], plan)
        assert cell.count == pytest.approx(pooled.count, abs=0.05)
        np.testing.assert_allclose(cell.total, pooled.total, atol=0.01)
        if pooled.second is not None:
            np.testing.assert_allclose(cell.second, pooled.second, atol=0.01)
    assert to_gaussian(cells[0], plan, D)[0] == pytest.approx((y == 0).sum(), abs=0.05)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_noise_is_that_of_one_client(relation):
    plan = Plan(relation)
    sums = [client_sums(x, y, CLASSES, plan) for x, y in federation(3, 40)]
    exact = np.sum(sums, axis=0)
    noises = []
    for i in range(400):
        cells = federation_sum(np.mean(sums, axis=0), 3, plan, D, i.to_bytes(32, "big"), "sum")
        noises.append([np.append(cell.count, cell.total) - exact[c] for c, cell in cells.items()])
    sigma = plan.sum_sigma(1)
    found = np.array(noises)
    np.testing.assert_allclose(found[..., 1:].std(axis=0), sigma, rtol=0.17)
    np.testing.assert_allclose(found[..., 0].std(axis=0), plan.count_sigma, rtol=0.17)
    flat = found[..., 1:].reshape(400, -1)
    assert np.abs(np.corrcoef(flat.T) - np.eye(flat.shape[1])).max() < 5 / math.sqrt(400)


@pytest.mark.each_value
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_a_record_moves_the_federation_no_further_than_its_client(relation, covariance):
    rng, plan = np.random.default_rng(0), Plan(relation, covariance)
    weight = np.ones(width(plan, D))
    weight[0] = plan.a if relation != "replace" else 1.0
    if covariance == "full":
        weight[1 + D :] = np.where(np.equal(*np.tril_indices(D)), 1.0, math.sqrt(2))
    clients = list(federation(3, 10))
    total = sum(client_sums(x, y, CLASSES, plan) for x, y in clients)
    for _ in range(200):
        x, y = clients[1]
        x2, y2, i = x.copy(), y.copy(), rng.integers(len(x))
        x2[i] = -x[i] if rng.random() < 0.3 else unit_rows(rng.normal(size=(1, D)))[0]
        if relation == "add_remove":
            x2, y2 = np.delete(x, i, axis=0), np.delete(y, i)
        elif relation == "replace_any":
            y2[i] = rng.integers(CLASSES)
        parts = [clients[0], (x2, y2), clients[2]]
        other = sum(client_sums(a, b, CLASSES, plan) for a, b in parts)
        assert np.linalg.norm((total - other) * weight) <= plan.sum_sensitivity * (1 + 1e-9)


def test_the_gain_over_averaged_releases_by_hand():
    """50 clients of 100 rows, epsilon 1: the standard deviation of a class mean's number."""
    joint = Plan("add_remove", "full", a=1e-9)
    assert joint.sum_sigma(1) / 5000 == pytest.approx(0.00106, abs=5e-6)
    averaged = 0.321238 / math.sqrt(50)  # of Theorem 4.1's releases
    assert averaged / (joint.sum_sigma(1) / 5000) == pytest.approx(43, abs=0.5)


def test_the_same_mean_has_the_same_noise_and_another_cohort_fresh_noise():
    plan = Plan()
    sums = [client_sums(x, y, CLASSES, plan) for x, y in federation()]
    a, b = (federation_sum(np.mean(sums, axis=0), 6, plan, D, KEY, "sum") for _ in range(2))
    assert all(np.array_equal(a[c].total, b[c].total) for c in a)
    fewer = federation_sum(np.mean(sums[1:], axis=0), 5, plan, D, KEY, "sum")
    step = a[3].total - fewer[3].total  # nobody has class 3: what is left is noise against noise
    assert np.linalg.norm(step) > 1


def test_an_empty_client_adds_nothing():
    plan = Plan(covariance="full")
    none = client_sums(np.zeros((0, D)), np.zeros(0, int), CLASSES, plan)
    assert not none.any()
    assert none.shape == (CLASSES, 1 + D + 15)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: client_sums(2 * np.eye(D), np.zeros(D, int), 2, Plan()), InputError, "unit_rows"),
        (
            lambda: federation_sum(np.zeros((2, 6)), 3, Plan("replace", calibration="paper"), D, KEY, "s"),
            InputError,
            "analytic",
        ),
    ],
)
def test_unsuitable_plans_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
