"""The robust rules against NumPy, SciPy and naive loops, and what one client cannot do to them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import optimize, stats

from fedfm.aggregation import _robust
from fedfm.aggregation.geometric_median import GeometricMedian
from fedfm.aggregation.krum import Krum
from fedfm.aggregation.mean import Mean
from fedfm.aggregation.median import Median
from fedfm.aggregation.multi_krum import MultiKrum
from fedfm.aggregation.norm_clipping import NormClipping
from fedfm.aggregation.secure import Secure
from fedfm.aggregation.trimmed_mean import TrimmedMean
from fedfm.config.registry import available, name_of, resolve
from fedfm.core.fields import check
from fedfm.linalg.params import Params

RULES = [
    Median(),
    TrimmedMean(trim=0.25),
    Krum(),
    MultiKrum(),
    MultiKrum(keep=2),
    NormClipping(),
    NormClipping(bound=0.5),
    GeometricMedian(),
]
SHAPES = {"head.weight": (3, 4), "head.bias": (3,), "scale": ()}
SIZE = 16
NUMBERS = st.floats(-1024, 1024, width=32)
COHORTS = st.integers(5, 9).flatmap(lambda m: arrays(np.float32, (m, SIZE), elements=NUMBERS))
WILD = arrays(np.float32, (SIZE,), elements=st.floats(-(2.0**100), 2.0**100, width=32))


def params(row, dtype=torch.float32):
    """A vector as Params of several tensors, and a counter that is not a float."""
    parts = np.split(np.asarray(row), np.cumsum([math.prod(s) for s in SHAPES.values()])[:-1])
    tensors = {n: torch.tensor(p.reshape(s)).to(dtype) for (n, s), p in zip(SHAPES.items(), parts, strict=True)}
    return Params({**tensors, "steps": torch.tensor([7])})


def vector(w):
    return torch.cat([w[name].reshape(-1) for name in SHAPES]).double().numpy()


def combined(rule, x, weights=None, dtype=torch.float32):
    out = rule.combine([1.0] * len(x) if weights is None else weights, [params(row, dtype) for row in x])
    assert out["steps"].tolist() == [7]
    assert out.layout is params(x[0], dtype).layout
    return vector(out)


def cohort(m, seed=0):
    return np.random.default_rng(seed).normal(size=(m, SIZE)).astype(np.float32)


@pytest.fixture(params=[1 << 20, 1], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(_robust, "_ENTRIES", request.param)
    monkeypatch.setattr(_robust, "_LEAST", 5)


@pytest.mark.usefixtures("blocks")
class TestAgainstOthers:
    @pytest.mark.parametrize("m", [1, 2, 5, 8])
    def test_median_is_numpys(self, m):
        x = cohort(m)
        np.testing.assert_allclose(combined(Median(), x), np.median(x.astype(np.float64), 0), rtol=1e-6)

    @pytest.mark.parametrize(("m", "trim"), [(10, 0.1), (10, 0.3), (8, 0.25), (5, 0.4)])
    def test_trimmed_mean_is_scipys(self, m, trim):
        x = cohort(m)
        expected = stats.trim_mean(x.astype(np.float64), trim, axis=0)
        np.testing.assert_allclose(combined(TrimmedMean(trim), x), expected, rtol=1e-5, atol=1e-7)

    def test_a_small_cohort_is_trimmed_too(self):
        x = cohort(5)
        np.testing.assert_allclose(combined(TrimmedMean(0.1), x), np.sort(x, 0)[1:4].mean(0), rtol=1e-5, atol=1e-7)
        x = cohort(3)
        np.testing.assert_allclose(combined(TrimmedMean(0.45), x), np.median(x, 0), rtol=1e-6)

    @pytest.mark.parametrize(("m", "f"), [(5, 1), (9, 1), (9, 3), (12, 2)])
    def test_krum_is_the_naive_one(self, m, f):
        x = cohort(m, seed=m)
        s = naive_scores(x, f)
        np.testing.assert_array_equal(combined(Krum(f), x), x[int(np.argmin(s))])
        best = np.argsort(s)
        np.testing.assert_allclose(combined(MultiKrum(f), x), x[best[: m - f]].mean(0), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(combined(MultiKrum(f, keep=3), x), x[best[:3]].mean(0), rtol=1e-4, atol=1e-6)

    def test_norm_clipping_is_the_naive_one(self):
        x, n = cohort(6) * np.arange(1, 7)[:, None], np.array([3.0, 1, 4, 1, 5, 9])
        for rule, c in (
            (NormClipping(bound=8.0), 8.0),
            (NormClipping(multiple=0.5), 0.5 * np.median(np.linalg.norm(x, axis=1))),
        ):
            total = np.zeros(SIZE)
            for weight, row in zip(n, x, strict=True):
                total += weight * row / max(1.0, np.linalg.norm(row) / c)
            np.testing.assert_allclose(combined(rule, x, n), total / n.sum(), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("weights", [None, [1.0, 2, 3, 4, 5, 6, 7]])
    def test_geometric_median_is_scipys_minimum(self, weights):
        x = cohort(7).astype(np.float64)
        a = np.ones(7) if weights is None else np.array(weights)

        def objective(v):
            return (a * np.linalg.norm(x - v, axis=1)).sum()

        best = optimize.minimize(objective, x.mean(0), method="BFGS", options={"gtol": 1e-9})
        ours = combined(GeometricMedian(iterations=500), x, weights, torch.float64)
        assert objective(ours) <= best.fun + 1e-9
        np.testing.assert_allclose(ours, best.x, atol=1e-5)

    def test_weiszfelds_first_step_by_hand(self):
        """On a line: -1, 0, 0, 3 under weights 4, 1, 1, 1 start at the median 0, at distances 1, nu, nu, 3; with
        nu = 1/2 the next v is (-4 + 1) / (4 + 2 + 2 + 1/3) = -0.36.
        """
        x = np.zeros((4, SIZE))
        x[0, 0], x[3, 0] = -1, 3
        rule = GeometricMedian(iterations=1, epsilon=0.5)
        assert combined(rule, x, [4.0, 1, 1, 1])[0] == pytest.approx(-0.36)


def naive_scores(x, f):
    out = []
    for i in range(len(x)):
        d = sorted(
            sum((float(a) - float(b)) ** 2 for a, b in zip(x[i], x[j], strict=True)) for j in range(len(x)) if j != i
        )
        out.append(sum(d[: len(x) - f - 2]))
    return np.array(out)


@pytest.mark.parametrize("rule", RULES, ids=str)
class TestEveryRule:
    @settings(max_examples=25, deadline=None)
    @given(x=COHORTS, seed=st.integers(0, 99))
    def test_the_order_of_clients_does_not_matter(self, rule, x, seed):
        x = x + np.random.default_rng(0).normal(size=x.shape).astype(np.float32)  # no ties between distances
        order = np.random.default_rng(seed).permutation(len(x))
        n = np.arange(1.0, len(x) + 1)
        np.testing.assert_allclose(combined(rule, x, n), combined(rule, x[order], n[order]), rtol=1e-4, atol=1e-3)

    @settings(max_examples=25, deadline=None)
    @given(row=arrays(np.float32, (SIZE,), elements=NUMBERS), m=st.integers(5, 9))
    def test_equal_updates_give_that_update(self, rule, row, m):
        if isinstance(rule, NormClipping) and rule.bound is not None:
            row = row * np.float32(0.4 / max(float(np.linalg.norm(row)), 0.4))
        np.testing.assert_allclose(combined(rule, np.stack([row] * m), np.arange(1.0, m + 1)), row, rtol=3e-7)

    def test_one_huge_update_does_not_make_the_result_huge(self, rule):
        x = cohort(7)
        x[3] = 1e18
        out = combined(rule, x)
        assert np.linalg.norm(out) < 10

    def test_a_robust_rule_states_that_the_server_sees_every_update(self, rule):
        assert rule.transport.form == "plain"
        assert rule.least() >= 1
        check(rule, "aggregation")


class TestInfluence:
    @pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.1), TrimmedMean(0.3)], ids=str)
    @settings(max_examples=25, deadline=None)
    @given(x=COHORTS, wild=WILD, place=st.integers(0, 4))
    def test_one_client_cannot_leave_the_hull_of_the_rest(self, rule, x, wild, place):
        rest = np.delete(x, place, 0)
        out = combined(rule, np.insert(rest, place, wild, 0))
        slack = 1e-6 * np.abs(rest).max()  # the mean of float32 values is rounded to one
        assert (out >= rest.min(0) - slack).all()
        assert (out <= rest.max(0) + slack).all()

    @settings(max_examples=25, deadline=None)
    @given(x=COHORTS, wild=WILD)
    def test_norm_clipping_bounds_what_one_client_adds(self, x, wild):
        x[0], without = wild, np.concatenate([np.zeros((1, SIZE), np.float32), x[1:]])
        moved = combined(NormClipping(bound=2.0), x) - combined(NormClipping(bound=2.0), without)
        assert np.linalg.norm(moved) <= 2.0 / len(x) + 1e-5

    @settings(max_examples=25, deadline=None)
    @given(x=COHORTS, wild=WILD)
    def test_the_geometric_median_stays_near_the_majority(self, x, wild):
        """A share q < 1/2 moves it at most 2 (1 - q) / (1 - 2 q) radii of the others (Minsker 2015, Lemma 2.1)."""
        rest, q = x[1:].astype(np.float64), 1 / len(x)
        centre = rest.mean(0)
        radius = np.linalg.norm(rest - centre, axis=1).max()
        out = combined(GeometricMedian(iterations=60), np.insert(rest, 0, wild, 0), dtype=torch.float64)
        assert np.linalg.norm(out - centre) <= 2 * (1 - q) / (1 - 2 * q) * radius * 1.01 + 1e-3

    @pytest.mark.parametrize("f", [1, 2, 3])
    def test_krum_takes_an_honest_update(self, f):
        m = 2 * f + 3
        x = cohort(m, seed=f) * 0.1 + 1
        x[:f] = np.random.default_rng(1).normal(size=(f, SIZE)) * 1e9
        assert combined(Krum(f), x).tolist() in x[f:].tolist()
        kept = combined(MultiKrum(f), x)
        np.testing.assert_allclose(kept, x[f:].mean(0), rtol=1e-5)

    @pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.25), Krum(), MultiKrum()], ids=str)
    def test_weights_do_not_count_where_a_liar_could_use_them(self, rule):
        x = cohort(6)
        np.testing.assert_array_equal(combined(rule, x), combined(rule, x, [1e9, 1, 1, 1, 1, 1]))

    @pytest.mark.parametrize("rule", [NormClipping(), GeometricMedian(iterations=300)], ids=str)
    def test_weights_count_where_the_paper_has_them(self, rule):
        x = cohort(6)
        doubled = np.concatenate([x, x[:1]])
        weighed = combined(rule, x, [2.0, 1, 1, 1, 1, 1])
        if isinstance(rule, GeometricMedian):
            np.testing.assert_allclose(weighed, combined(rule, doubled), rtol=1e-5, atol=1e-6)
        assert np.abs(weighed - combined(rule, x)).max() > 1e-3

    def test_the_mean_has_no_such_bound(self):
        x = cohort(5)
        x[0] = 1e6
        from fedfm.linalg.running_mean import weighted_mean

        assert np.abs(vector(weighted_mean((1.0, params(row)) for row in x))).max() > 1e5


def test_every_rule_of_the_room_is_tested_and_cites_its_paper():
    import sys

    found = {name: resolve("aggregation", name) for name in available("aggregation")}
    assert set(found.values()) == {type(rule) for rule in RULES} | {
        Mean,
        Secure,
    }  # Secure: tests/aggregation/test_secure.py
    for name, cls in found.items():
        assert name_of("aggregation", cls()) == name
        paper = sys.modules[cls.__module__].__doc__
        assert "arXiv:" in paper or "ePrint " in paper
