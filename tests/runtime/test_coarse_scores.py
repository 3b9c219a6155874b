"""The precision of a silo's scores: pooled figures stay exact, all others have few digits."""

from __future__ import annotations

import math
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from fedfm.core import tasks
from fedfm.runtime.coarse_scores import coarse

FIGURES = st.floats(allow_nan=False, allow_infinity=False)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_accuracy_that_counts_rows_is_exact(counted):
    right, n = counted
    assert coarse({"n": n, "accuracy": right / n}, tasks.default())["accuracy"] == right / n


@given(FIGURES, st.sampled_from(["loss", "accuracy", "reward_margin"]))
def test_any_other_figure_has_four_digits_and_four_places(value, key):
    told = coarse({"n": 7, key: value}, tasks.find("preference"))[key]
    if key == "accuracy" and 0 <= value <= 1 and value * 7 == round(value * 7):
        return
    _, digits, exponent = Decimal(repr(told)).normalize().as_tuple()
    assert len(digits) <= 4
    assert -4 <= int(exponent) <= 9
    assert math.isclose(told, min(max(value, -1e9), 1e9), rel_tol=5.1e-4, abs_tol=5.1e-5)


@given(FIGURES)
def test_rounding_twice_changes_nothing(value):
    once = coarse({"n": 5, "loss": value}, tasks.default())
    assert coarse(once, tasks.default()) == once


def test_other_figures_stay_exact_and_missing_ones_stay_missing():
    found = {"n": 4, "accuracy": None, "loss": math.inf, "macro_f1": 0.25, "rouge_1": 0.123456}
    found |= {"tokens": 123456, "loss_of_tokens": 9876.54321}  # sums, of which counts are exact
    told = {"n": 4, "accuracy": None, "loss": math.inf, "rouge_1": 0.1235, "tokens": 123456, "loss_of_tokens": 9877.0}
    assert coarse(found, tasks.find("instruction")) == told
    assert coarse(found, tasks.default()) == {key: told[key] for key in ("n", "accuracy", "loss")}
