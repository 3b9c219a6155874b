"""The findings that every attack on membership, and every test of a claimed epsilon, derives from its scores."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedfm.audits.finding import CLAIM, twice
from fedfm.audits.inference.one_run import of_steps
from fedfm.audits.member_scores import CellScores, MemberScores, finding_on_rate
from fedfm.audits.stated_epsilon import Claim, finding_on_claim


def scores_of(seed, shift, clients=4, n=30, m=40):
    rng = np.random.default_rng(seed)
    cells = [CellScores(rng.normal(shift, 1, n + 5 * i), rng.normal(0, 1, m)) for i in range(clients)]
    return MemberScores(cells, lambda level: np.random.default_rng([seed, int(1e4 * level)]), digits=6)


@given(st.integers(0, 10**6), st.floats(0, 3))
@settings(max_examples=15, deadline=None)
def test_the_figure_is_the_mean_of_scikit_learns_weighted_by_members(seed, shift):
    scores = scores_of(seed, shift)
    by_cell = [roc_auc_score(np.r_[np.ones(len(a)), np.zeros(len(b))], np.r_[a, b]) for a, b in scores.cells]
    mean, low, high = scores.interval(0.95)
    assert mean == pytest.approx(np.average(by_cell, weights=[len(a) for a, _ in scores.cells]), abs=1e-12)
    assert low <= mean <= high
    assert scores.interval(0.9999)[1] <= low
    assert scores.of_clients() == {"clients": 4, "members": 150, "strangers": 160}


@given(st.integers(0, 10**6), st.floats(0, 4), st.floats(0.01, 8), st.integers(1, 2))
@settings(max_examples=25, deadline=None)
def test_a_claim_is_contradicted_exactly_where_the_strict_interval_is_above_what_it_allows(seed, shift, epsilon, steps):
    scores, claim = scores_of(seed, shift), Claim(epsilon, 1e-5, steps)
    found = scores.finding("membership", "?", "A row scores higher", {"clients": 4}, claim, unit=" A row is a block.")
    total, delta = steps * epsilon, 1e-5 * (1 + math.exp(epsilon) * (steps - 1))
    allowed = 1 - (1 - delta) ** 2 / (1 + math.exp(total))  # area under the trade-off curve of (epsilon, delta)
    assert found.detail["allowed_by_epsilon"] == pytest.approx(allowed, rel=1e-9)
    assert found.contradicts == (scores.interval(0.9999)[1] > found.detail["allowed_by_epsilon"])
    assert found.verdict == "leaks" or not found.contradicts
    assert found.says.endswith(f"allows {allowed:.3f}. A row is a block.")
    free = scores.finding("membership", "?", "A row scores higher", {})
    assert (free.estimate, free.low, free.high, free.contradicts) == (found.estimate, found.low, found.high, False)


def test_the_rate_counts_members_above_the_threshold():
    scores = scores_of(1, 2.0)
    rate = scores.rate(np.random.default_rng(0))
    found = finding_on_rate("tpr", "?", rate, {}, by="the loss", strangers="test rows", unit=" A row is a line.")
    assert found.estimate == rate.hits / 150
    assert found.says.startswith(f"By the loss, {100 * rate.tpr:.1f} % of the training rows")
    assert found.says.endswith("the bound is 5 %. A row is a line.")
    few = MemberScores([CellScores(np.ones(3), np.zeros(2))], lambda level: np.random.default_rng(0))
    assert few.rate(np.random.default_rng(0)) is None


@pytest.mark.parametrize("low", [0.0, 7.9, 8.0, 8.1, math.inf])
@pytest.mark.parametrize("rule", [CLAIM, twice(7.0, 0.9999), twice(9.0, 0.9999)])
def test_only_a_leak_contradicts_a_claim_and_the_sentence_says_it(low, rule):
    found = finding_on_claim("epsilon", "?", (low, low, None), 8.0, rule, "It reads.", {})
    assert found.contradicts == (found.verdict == "leaks")
    assert found.contradicts == ("it does not hold" in found.says)
    assert found.says.startswith("It reads. The manifest claims 8")


@given(st.floats(0, 60), st.floats(0, 1), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_steps_compose_one_after_the_other(epsilon, delta, steps):
    """(e, d) and then k steps: P(A) <= e^e P'(A) + d, and P' is known by induction."""
    total, within = 0.0, 0.0
    for _ in range(steps):
        total, within = total + epsilon, delta + math.exp(epsilon) * within
    found = of_steps(epsilon, delta, steps)
    assert found[0] == pytest.approx(total)
    assert found[1] == pytest.approx(min(within, 1.0))
