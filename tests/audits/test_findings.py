"""Findings: the verdict is the rule applied to the numbers that are shown, and the rule in words says so."""

import math
import operator
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedfm.audits.finding import ABOVE, BELOW, CLAIM, Finding, VerdictRule, absorb_rounding, lines, nothing, twice
from fedfm.audits.inference.rates import mean_interval

SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
numbers = st.one_of(st.none(), st.floats(-1e3, 1e3), st.sampled_from([0.0, 0.5, 0.55, math.inf, math.nan]))
SIDES = ("estimate", "low", "high", "bound", "a further figure", "0.5")
few = st.lists(st.sampled_from([f"{a} {sign} {b}" for a in SIDES for sign in SIGNS for b in SIDES]), max_size=3)
rules = st.builds(
    lambda leaks, holds, further: VerdictRule(tuple(leaks), tuple(holds), "why", {"a further figure": further}),
    few,
    few,
    numbers,
)


def expected(rule, known):
    """The verdict by an independent reading of the rule."""

    def true(text):
        left, sign, right = re.split(r" (<=|>=|<|>) ", text)
        values = [known.get(name, rule.numbers.get(name, 0.5)) for name in (left, right)]
        return None not in values and SIGNS[sign](*values)

    if any(map(true, rule.leaks)):
        return "leaks"
    return "holds" if rule.holds and all(map(true, rule.holds)) else "inconclusive"


def found(rule, estimate=None, low=None, high=None, bound=None, **more):
    return Finding("a", "Q?", estimate, low, high, bound, rule, "So.", **more)


@given(rules, numbers, numbers, numbers, numbers)
def test_the_verdict_is_the_rule_applied_to_the_numbers(rule, estimate, low, high, bound):
    f = found(rule, estimate, low, high, bound)
    known = {"estimate": estimate, "low": low, "high": high, "bound": bound}
    assert f.verdict == f.to_dict()["verdict"] == expected(rule, known)


@given(rules, numbers, numbers, numbers, numbers)
def test_the_words_give_the_same_verdict_and_print_numbers_on_the_side_that_they_are_on(
    rule, estimate, low, high, bound
):
    f = found(rule, estimate, low, high, bound)
    said = f.to_dict()["rule"]
    shown = re.findall(r"\((\S+|not known) (<=|>=|<|>) (\S+|not known): (yes|no)\)", said)
    assert len(shown) == len(rule.leaks) + len(rule.holds)
    answers = []
    for left, sign, right, answer in shown:
        answers.append(answer == "yes")
        if "not known" not in (left, right):
            assert SIGNS[sign](float(left), float(right)) == answers[-1]
        else:
            assert not answers[-1]
    leaks, holds = answers[: len(rule.leaks)], answers[len(rule.leaks) :]
    assert f.verdict == ("leaks" if any(leaks) else "holds" if holds and all(holds) else "inconclusive")
    # As the terminal wraps it.
    assert f"{f.verdict}, by its rule: {said}." in " ".join(lines([f]).split()).replace("\N{NO-BREAK SPACE}%", " %")


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_an_interval_on_one_side_of_the_bound_is_never_inconclusive(a, b, bound):
    low, high = sorted((a, b))
    assert found(ABOVE, low=low, high=high, bound=bound).verdict == (
        "leaks" if low > bound else "holds" if high <= bound else "inconclusive"
    )
    assert found(BELOW, low=low, high=high, bound=bound).verdict == (
        "leaks" if high < bound else "holds" if low >= bound else "inconclusive"
    )
    assert found(CLAIM, low=low, bound=bound).verdict == ("leaks" if low > bound else "holds")


@given(st.floats(0.01, 50), st.floats(0, 60), st.floats(0, 60))
def test_only_the_strict_level_contradicts_a_claim(stated, low, strict):
    low, strict = (absorb_rounding(x, stated) for x in (max(low, strict), min(low, strict)))
    f = found(twice(strict, 0.9999), low=low, bound=stated)
    assert f.verdict == ("leaks" if strict > stated else "holds" if low <= stated else "inconclusive")
    if f.verdict != "leaks":
        with pytest.raises(ValueError, match="contradicts a claim"):
            found(twice(strict, 0.9999), low=low, bound=stated, contradicts=True)


def test_a_finding_without_a_measurement_is_inconclusive():
    f = nothing("a", "Q?", "There are no rows.")
    assert (f.verdict, f.to_dict()["rule"]) == ("inconclusive", "inconclusive: nothing was measured")


def test_a_rule_that_compares_nothing_is_refused():
    with pytest.raises(ValueError, match="is not a comparison"):
        VerdictRule(("low above bound",))


@given(st.lists(st.tuples(st.floats(0.2, 0.4), st.floats(0.2, 0.4)), min_size=2, max_size=12))
def test_the_interval_over_clients_is_students(pairs):
    figures, reference = np.array(pairs).T
    low, high = mean_interval(figures, reference)
    apart = figures - reference
    error = stats.sem(apart)
    if error > 1e-9:
        by_scipy = stats.t.interval(0.95, len(apart) - 1, loc=figures.mean(), scale=error)
        assert (low, high) == pytest.approx(np.clip(by_scipy, 0, 1), abs=1e-9)
        # On the same side of the bound as the differences of 0.
        test = stats.ttest_rel(figures, reference)
        if abs(test.pvalue - 0.05) > 1e-6:
            assert (low > reference.mean() or high < reference.mean()) == (test.pvalue < 0.05)


def test_of_one_client_there_is_no_interval_and_no_verdict():
    low, high = mean_interval(np.array([0.007]), np.array([0.041]))
    assert (low, high) == (None, None)
    assert found(BELOW, 0.007, low, high, 0.041).verdict == "inconclusive"
