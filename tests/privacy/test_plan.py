"""Every sensitivity is searched for numerically: never above the bound, and at it where the bound is tight."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import minimize

from fedfm.errors import InputError
from fedfm.methods.fedpft.noisy_moments import statistics
from fedfm.methods.fedpft.release_plan import CALIBRATIONS, COVARIANCES, RELATIONS, Plan, too_noisy
from fedfm.privacy import gaussian
from fedfm.privacy.noise import unit_rows

HALF = [[1.0, 0.0], [-0.5, math.sqrt(0.75)]]  # two unit rows at cosine -1/2


def vector(cells, plan):
    """All cells of a client as the one vector on which the noise is white."""
    out = []
    for cell in cells:
        d = len(cell.total)
        if not plan.counts_public:
            out.append([plan.a * cell.count])
        out.append(cell.total)
        if plan.covariance == "diag":
            out.append(cell.second)
        if plan.covariance == "full":
            row, column = np.tril_indices(d)
            out.append(cell.second * np.where(row == column, 1.0, math.sqrt(2)))
    return np.concatenate(out)


def released(x, labels, plan, classes=3):
    """The exact statistics of a client, weighted as its noise is."""
    v = vector([statistics(x[labels == c], plan) for c in range(classes)], plan)
    return v / len(x) if plan.counts_public else v


def distance(before, after, plan):
    return float(np.linalg.norm(released(*before, plan) - released(*after, plan)))


def neighbours(rng, plan, n, d):
    """A random pair of neighbouring data sets: uniform rows, or rows that lie on few points."""
    x = unit_rows(rng.normal(size=(n, d)))
    if rng.random() < 0.5:
        x = unit_rows(np.sign(x) * (np.abs(x) == np.abs(x).max(axis=1, keepdims=True)))
    labels = np.zeros(n, int) if plan.counts_public else rng.integers(0, 3, n)
    i, y = rng.integers(n), unit_rows(rng.normal(size=(1, d)))[0]
    if plan.relation == "add_remove":
        return (x, labels), (np.delete(x, i, axis=0), np.delete(labels, i))
    x2, labels2 = x.copy(), labels.copy()
    x2[i] = rng.choice([-1, 1]) * x[i] if rng.random() < 0.3 else y
    if plan.relation == "replace_any":
        labels2[i] = rng.integers(0, 3)
    return (x, labels), (x2, labels2)


def worst(plan, n, d, rng):
    """Hill climbing over the changed row before and after, from several starts, for each pair of labels."""
    rest = unit_rows(rng.normal(size=(n - 1, d)))
    rest_labels = np.zeros(n - 1, int)

    def of(flat, label_a, label_b):
        a, b = (unit_rows(part[None]) for part in np.split(flat, 2))
        before = (np.vstack([rest, a]), np.append(rest_labels, label_a))
        if plan.relation == "add_remove":
            return distance(before, (rest, rest_labels), plan)
        return distance(before, (np.vstack([rest, b]), np.append(rest_labels, label_b)), plan)

    pairs = [(0, 0)] if plan.relation != "replace_any" else [(0, 0), (0, 1)]
    best = 0.0
    for labels, _ in itertools.product(pairs, range(4)):
        found = minimize(
            lambda f, p=labels: -of(f, *p), rng.normal(size=2 * d), method="Powell", options={"maxfev": 400}
        )
        best = max(best, -found.fun)
    return best


@pytest.mark.each_value
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("a", [0.25, 1.0, 2.0])
def test_the_sensitivity_is_the_largest_distance_of_neighbours(relation, covariance, a):
    plan, rng = Plan(relation, covariance, a=a), np.random.default_rng(0)
    for n, d in [(1, 2), (2, 2), (5, 3), (30, 8)]:
        bound = plan.sensitivity(n)
        for _ in range(60):
            if n > 1 or relation != "add_remove":
                assert distance(*neighbours(rng, plan, n, d), plan) <= bound * (1 + 1e-12)
    n, d = 4, 2
    found = worst(plan, n, d, rng)
    assert found <= plan.sensitivity(n) * (1 + 1e-12)
    assert found >= plan.sensitivity(n) * 0.98  # tight


def test_rows_at_cosine_minus_one_half_by_hand():
    x, y = np.array(HALF)
    assert np.sum((x - y) ** 2) == pytest.approx(3)
    assert np.sum((np.outer(x, x) - np.outer(y, y)) ** 2) == pytest.approx(1.5)
    plan = Plan("replace", "full")
    one, other = (vector([statistics(row[None], plan)], plan) for row in (x, y))
    assert np.linalg.norm(one - other) == pytest.approx(math.sqrt(4.5)) == pytest.approx(plan.sensitivity(1))
    # The same distance for the diagonals alone: x = (cos t, sin t), y = (sin t, cos t) with sin 2t = -1/2.
    t, plan = math.radians(-15), Plan("replace", "diag")
    x, y = np.array([[math.cos(t), math.sin(t)]]), np.array([[math.sin(t), math.cos(t)]])
    one, other = (vector([statistics(row, plan)], plan) for row in (x, y))
    assert np.linalg.norm(one - other) == pytest.approx(math.sqrt(4.5)) == pytest.approx(plan.sensitivity(1))


def test_the_second_moment_alone_moves_by_root_two():
    found = minimize(
        lambda f: -np.linalg.norm(np.subtract(*(np.outer(r, r) for r in unit_rows(f.reshape(2, 3))))),
        np.arange(6.0) - 2.2,
        method="Powell",
    )
    assert -found.fun == pytest.approx(math.sqrt(2), rel=1e-4)


@pytest.mark.parametrize("n", [2, 3, 10, 50])
def test_what_the_paper_releases_moves_by_less_than_it_says(n):
    """A mean and a centred covariance (divisor n): (2/n) sqrt(1 + 4 (1 - 1/n)^2) < sqrt(20)/n < 2 sqrt(10)/n."""
    rng, d = np.random.default_rng(n), 3
    bound = 2 / n * math.sqrt(1 + 4 * (1 - 1 / n) ** 2)

    def moved(rest, x, y):
        one, other = (np.vstack([rest, row]) for row in (x, y))
        parts = [one.mean(0) - other.mean(0), np.cov(one.T, bias=True) - np.cov(other.T, bias=True)]
        return math.hypot(*(np.linalg.norm(p) for p in parts))

    for _ in range(300):
        rows = unit_rows(rng.normal(size=(n + 1, d)))
        assert moved(rows[:-2], rows[-2], rows[-1]) <= bound
    e = np.eye(d)[0]
    assert moved(np.tile(e, (n - 1, 1)), e, -e) == pytest.approx(bound)  # attained
    assert bound < math.sqrt(20) / n < 2 * math.sqrt(10) / n


def test_replace_any_is_no_less_than_replace():
    """sqrt(2) times the sums of add_remove is too little: a row may also change without changing its class."""
    for covariance in COVARIANCES:
        plan = Plan("replace_any", covariance)
        assert plan.sensitivity(9) == pytest.approx(2 if covariance == "spherical" else math.sqrt(4.5))
        assert math.sqrt(2) * Plan("add_remove", covariance).sensitivity(9) < plan.sensitivity(9)
    assert Plan("replace_any", "full", a=0.5).sensitivity(9) == pytest.approx(math.sqrt(4.5))  # 2 (2 + a^2) = 4.5
    assert Plan("replace_any", "full", a=1.0).sensitivity(9) == pytest.approx(math.sqrt(6))


def test_noise_by_hand():
    assert Plan("replace", "full").sigma(100) == pytest.approx(0.079139, abs=5e-7)
    assert Plan("replace").sigma(100) == pytest.approx(0.074613, abs=5e-7)
    assert Plan("replace", "full", delta=0.02).sigma(50) == pytest.approx(0.069953, abs=5e-7)
    assert Plan("add_remove", "full", a=1e-9).sigma(7) / 100 == pytest.approx(0.052759, abs=5e-7)  # sums over 100 rows
    assert Plan().sigma(7) == pytest.approx(3.8454, abs=5e-5)
    assert Plan().count_sigma == pytest.approx(15.382, abs=5e-4)
    paper = Plan("replace", "full", calibration="paper")
    assert paper.sigma(100) == pytest.approx(0.321238, abs=5e-7)
    for covariance, gain in (("full", 4.06), ("diag", 4.06)):
        assert paper.sigma(100) / Plan("replace", covariance).sigma(100) == pytest.approx(gain, abs=0.005)
    assert paper.sigma(100) / (Plan("add_remove", "full", a=1e-9).sigma(1) / 100) == pytest.approx(6.09, abs=0.005)


def test_noise_of_sums_and_counts():
    assert Plan("replace").sum_sigma(100) == pytest.approx(100 * Plan("replace").sigma(100))
    assert Plan("replace").sum_sigma(100) == pytest.approx(Plan("replace").sum_sigma(3))  # no n in the noise of sums
    assert Plan().sum_sigma(0) == Plan().sigma(0) == Plan().sigma(10**6)
    assert Plan("replace").count_sigma == 0


def test_the_papers_calibration_is_allowed_while_it_holds():
    plan = Plan("replace", "full", calibration="paper")
    assert plan.epsilon_spent == pytest.approx(gaussian.epsilon_of(plan.sigma(7), math.sqrt(4.5) / 7, 1e-5))
    assert 0.2 < plan.epsilon_spent < 0.25  # four times the noise that is needed
    for epsilon in (10.0, 40.0, 150.0):
        spent = Plan("replace", "full", epsilon=epsilon, delta=0.01, calibration="paper").epsilon_spent
        assert spent <= epsilon
    with pytest.raises(InputError, match=r"not \(170, 0.01\)-private.*'analytic'"):
        Plan("replace", "full", epsilon=170.0, delta=0.01, calibration="paper")
    Plan("replace", "full", epsilon=170.0, delta=0.01)


def test_the_reading_with_the_clients_rows_promises_nothing():
    plan = Plan("replace", "full", calibration="paper_client")
    assert plan.epsilon_spent == math.inf
    assert plan.sigma(100, client_rows=1000) == pytest.approx(0.0321238, abs=5e-8)
    spent = plan.ledger_line(100, client_rows=1000)
    assert spent.epsilon == pytest.approx(2.724, abs=5e-4)  # of (mean, second moment), whose sensitivity is sqrt(4.5)/n
    assert "there is no guarantee" in spent.note
    assert "100" in spent.note
    assert plan.ledger_line(1, client_rows=1000).epsilon > 500
    for rows in (0, 99):
        with pytest.raises(InputError, match="client_rows"):
            plan.sigma(100, client_rows=rows)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_the_ledger_agrees_with_the_noise(relation, covariance, calibration):
    if calibration != "analytic" and relation != "replace":
        with pytest.raises(InputError, match="public count"):
            Plan(relation, covariance, calibration=calibration)
        return
    plan = Plan(relation, covariance, 2.0, 1e-6, calibration)
    spent = plan.ledger_line(40, client_rows=400)
    assert spent.epsilon == pytest.approx(gaussian.epsilon_of(spent.sigma, spent.sensitivity, spent.delta), rel=1e-6)
    assert (spent.unit, spent.relation, spent.delta) == ("record", relation, 1e-6)
    assert ("public" in spent.note) == (relation == "replace" and calibration != "paper_client")
    assert "parallel" in spent.composition


@pytest.mark.parametrize(("plan", "limit"), [(Plan("replace"), 103), (Plan(), 53)])
def test_a_warning_where_the_noise_is_longer_than_a_mean(plan, limit):
    """sigma_mu sqrt(192) > 1: 103.4 / n and 53.3 / n."""
    said = too_noisy(plan, 192, limit)
    assert said is not None
    assert f"{limit} rows" in said
    assert f"needs {limit + 1} rows" in said
    assert too_noisy(plan, 192, limit + 1) is None
    assert too_noisy(plan, 192, 0) is None


def test_the_warning_knows_the_papers_noise():
    said = too_noisy(Plan("replace", calibration="paper_client"), 192, 10, client_rows=100)
    assert said is not None
    assert "larger epsilon" in said
    assert too_noisy(Plan("replace", calibration="paper_client"), 192, 10, client_rows=10_000) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"relation": "remove"}, '"replace" or "replace_any"'),
        ({"covariance": "tied"}, '"diag" or "full"'),
        ({"calibration": "rdp"}, '"paper" or "paper_client"'),
        ({"epsilon": 0.0}, "epsilon = 0"),
        ({"epsilon": math.nan}, "epsilon = nan"),
        ({"delta": 0.0}, "delta = 0"),
        ({"delta": 1.0}, "delta = 1"),
        ({"delta": 1e-13}, "1e-12"),
        ({"delta": math.nan}, "delta = nan"),
        ({"a": 0.0}, "a = 0"),
        ({"a": math.inf}, "a = inf"),
    ],
)
def test_a_plan_that_promises_nothing_is_refused(fields, said):
    with pytest.raises(InputError, match=said):
        Plan(**fields)


def test_an_empty_class_has_no_mean():
    with pytest.raises(InputError, match="leave that class out"):
        Plan("replace").sigma(0)
