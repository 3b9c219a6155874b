"""Predicting and exporting end with a line of fedfm's own, whatever rows, run, folder and flags are given."""

from collections import Counter

import commands
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SLOW = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return commands.make_runs(tmp_path_factory.mktemp("runs"), commands.FEW)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(st.integers(0, 1 << 32))
def test_a_command_ends_with_a_line_and_an_exit_code(runs, tmp_path, seed):
    commands.within(runs, tmp_path, seed)


@pytest.mark.release
def test_hundreds_of_commands_end_with_the_expected_exit_codes(tmp_path):
    runs = commands.make_runs(tmp_path)
    found = Counter(commands.within(runs, tmp_path, seed)[0] for seed in range(500))
    assert min(found[kind] for kind in ("predict 0", "predict 2", "export 0", "export 2")) > 20
