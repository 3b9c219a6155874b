"""Intervals over seeds stay within a figure's range, contain its mean, and are as wide as the test rows require."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedfm
import small
from fedfm.api import studies
from fedfm.api.intervals import FIGURES, bounds, cut, interval
from fedfm.config.experiment import Experiment
from fedfm.runtime.progress import Progress

SHARES = st.lists(st.integers(0, 500).map(lambda k: k / 500), min_size=2, max_size=12)


@given(SHARES, st.sampled_from(FIGURES[:5]), st.integers(0, 5000))
def test_of_shares(values, key, rows):
    low, high = bounds(key, values, rows)
    mean = sum(values) / len(values)
    if low is None:
        assert rows == 0
        assert len(set(values)) == 1
        return
    assert 0 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1
    by_t = stats.t.interval(0.95, len(values) - 1, mean, stats.sem(values)) if len(set(values)) > 1 else (mean, mean)
    assert low <= max(by_t[0], 0) + 2e-3
    assert high >= min(by_t[1], 1) - 2e-3
    if rows:
        k = round(mean * rows)
        assert stats.binom.sf(k - 1, rows, low) <= 0.025 + 1e-9 or low == 0  # so many are as rare at the lower end
        assert stats.binom.cdf(k, rows, high) <= 0.025 + 1e-9 or high == 1


@given(st.lists(st.floats(1, 1e6), min_size=2, max_size=9), st.sampled_from(FIGURES[5:]))
def test_of_losses(values, key):
    low, high = bounds(key, values, 0)
    if len(set(values)) > 1 and low is not None:
        assert {"loss": 0, "perplexity": 1}[key] <= low <= sum(values) / len(values) + 1e-6 <= high + 2e-6


@given(SHARES, st.floats(-1, 0.5), st.floats(0.5, 2))
def test_a_cut_interval_is_the_plain_interval_within_its_limits(values, least, most):
    mean, half = interval(values)
    low, high = cut(values, least, most)
    assert low == (max(mean - half, least) if min(values) >= least else mean - half)
    assert high == (min(mean + half, most) if max(values) <= most else mean + half)
    assert low <= mean + 1e-9
    assert mean - 1e-9 <= high
    assert all(math.isnan(end) for end in cut(values[:1], least, most))


def test_by_hand():
    mean, half = interval([0.2, 0.4, 0.9])
    assert (mean, half) == (pytest.approx(0.5), pytest.approx(4.303 * 0.360555 / math.sqrt(3), abs=1e-3))
    assert bounds("accuracy", [0.5], 100) == (None, None)
    assert bounds("loss", [-2.0, -4.0], 0)[0] < -4.0  # a loss of one's own may be negative
    assert bounds("accuracy", [1.0, 1.0, 1.0], 54) == (pytest.approx(0.025 ** (1 / 54)), 1.0)


@pytest.mark.parametrize(("method", "of"), [("fedavg", "global"), ("local", "clients")])
def test_a_study_counts_the_rows_behind_each_figure(method, of, tmp_path):
    tables = small.experiment(tmp_path)
    tables["method"] = {"name": method, "rounds": 1, "local": {"learning_rate": 0.5, "epochs": 20}}
    found = studies.seeds(Experiment.from_dict(tables), [0, 1], tmp_path / "seeds", Progress())
    figure = found["figures"]["accuracy"]
    split = fedfm.load_run(tmp_path / "seeds" / "seed-0").manifest["split"]
    own = sum(part["test"]["rows"] for part in split["clients"].values())
    rows = 2 * (split["test"]["rows"] if of == "global" else own)
    assert (figure["low"], figure["high"]) == bounds("accuracy", figure["values"], rows)
    assert f"interval {figure['low']:.4f} to {figure['high']:.4f}" in studies.seeds_text(found)


@pytest.mark.parametrize("key", FIGURES)
@pytest.mark.parametrize("values", [[1e300, 1e308], [1e308] * 4, [math.inf, 3.0], [math.inf] * 2, [math.nan, 1.0]])
def test_no_end_of_an_interval_is_nan(key, values):
    ends = bounds(key, values, 0)
    assert all(end is None or not math.isnan(end) for end in ends)
