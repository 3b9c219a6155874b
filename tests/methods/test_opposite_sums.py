"""A silo whose class means point away from all others' is named; honest silos, however unlike, are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sums_of_rows import lying

import fedfm
from fedfm.methods._opposite_sums import find_opposite, limits_of
from small import features

LIES = ("fedncm", "sums"), ("ghofl", "moments"), ("ccvr", "moments"), ("analytic", "sums"), ("survey", "sums")


class Heard(fedfm.Progress):
    def __init__(self):
        self.lines = []

    def notice(self, text):
        self.lines.append(text)


def means_of(seed, silos, classes, d, *, domain=0.0, absent=0.0, spread=1.0, centred=False):
    """Class means of silos with an offset of their own, few of the classes, and unlike numbers of rows."""
    rng = np.random.default_rng(seed)
    centres, offset = rng.normal(size=(classes, d)), 0.0 if centred else rng.normal(size=d) * 3
    found = {}
    for k in range(silos):
        moved = domain * rng.normal() * rng.normal(size=d)
        rows = rng.integers(10, 200, (classes, 1))
        own = centres + offset + moved + spread * rng.normal(size=(classes, d)) / np.sqrt(rows)
        own[rng.random(classes) < absent] = np.nan
        found[f"client-{k:02d}"] = torch.from_numpy(own).float()
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(2, 12),
    st.integers(2, 6),
    st.integers(1, 64),
    st.sampled_from([0.0, 1.0, 10.0]),
    st.sampled_from([0.0, 0.3, 0.7]),
    st.sampled_from([0.3, 3.0, 30.0]),
    st.booleans(),
)
def test_honest_silos_are_never_named(seed, silos, classes, d, domain, absent, spread, centred):
    means = means_of(seed, silos, classes, d, domain=domain, absent=absent, spread=spread, centred=centred)
    assert find_opposite(means) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(4, 9), st.integers(2, 5), st.integers(32, 64), st.booleans())
def test_the_wrong_sign_is_named_whatever_the_features_have_in_common(seed, silos, classes, d, centred):
    means = means_of(seed, silos, classes, d, domain=1.0, centred=centred)
    means["client-01"] = -means["client-01"]
    assert list(find_opposite(means)) == ["client-01"]


def test_silos_that_agree_on_nothing_name_nobody():
    rng = np.random.default_rng(0)
    means = {f"client-{k}": torch.from_numpy(rng.normal(size=(3, 64))) for k in range(3)}
    means |= {f"other-{k}": -value for k, value in enumerate(means.values())}
    assert find_opposite(means) == {}


@pytest.mark.parametrize("size", [2, 3, 8, 20])
def test_the_limit_is_that_of_directions_drawn_at_random(size):
    """Compared with 400,000 directions of the normal distribution."""
    chance = 0.002
    (limit,) = limits_of([size], chance)
    z = np.random.default_rng(size).normal(size=(400_000, size))
    rate = np.mean(z[:, 0] <= -limit * np.linalg.norm(z, axis=1))
    if limit > 0.5:
        assert rate == pytest.approx(chance, rel=0.15)
    assert rate <= 1.15 * chance


def tables(path, method):
    return {
        "data": {"path": str(path), "partition": {"name": "iid", "clients": 4}},
        "model": {"name": "features"},
        "method": method,
        "run": {"seed": 1, "workers": 1},
    }


@pytest.mark.parametrize(("method", "handler"), LIES, ids=[method for method, _ in LIES])
def test_a_run_names_the_silo_whose_sums_have_the_wrong_sign(tmp_path, monkeypatch, method, handler):
    path = features(tmp_path, n=480, d=24)

    def lie(update):
        """The sums of rows with the opposite features."""
        names = {"survey": ("features.sum", "features_by_class.sum"), "analytic": ("b", "C")}.get(method, ("total",))
        changed = {name: -update.delta[name] for name in names}
        if method == "analytic":  # the last rows have the sums of the constant, and C the products of features
            d = len(changed["b"])
            changed["b"][-1] *= -1
            changed["C"][:-d] *= -1
            changed["C"][-1] *= -1
        return replace(update, delta=update.delta.replace(changed))

    honest, lied = Heard(), Heard()
    fedfm.run(tables(path, {"name": method}), tmp_path / "honest", progress=honest)
    lying(monkeypatch, method, handler, lie)
    fedfm.run(tables(path, {"name": method}), tmp_path / "lied", progress=lied)
    assert not [text for text in honest.lines if "point away" in text]
    (said,) = [text for text in lied.lines if "point away" in text]
    assert "client-01 (cosine -" in said
    assert 'data.without=["client-01"]' in said
