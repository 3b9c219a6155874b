"""Any experiment runs with all of its clients, or is refused by an error of fedfm's own."""

from collections import Counter

import experiments
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(max_examples=8, deadline=None, suppress_health_check=SLOW)
@given(st.integers(0, 1 << 32))
def test_a_drawn_experiment_runs_or_is_refused(tmp_path, seed):
    experiments.within(tmp_path, seed)


@pytest.mark.release
def test_hundreds_of_experiments_run_or_are_refused(tmp_path):
    found = Counter(experiments.within(tmp_path, seed)[0] for seed in range(400))
    assert found["ran"] > 100
    assert found["InputError"] > 50
