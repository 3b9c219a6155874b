"""Survey: the figures of any partition are those of the pooled rows, by independent computations in NumPy."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import f_oneway

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError, RunError
from fedfm.methods import _survey_figures as figures
from fedfm.methods import _survey_sums as sums
from fedfm.methods.survey import Survey, SurveyNoise
from fedfm.privacy.gaussian import delta_of
from fedfm.reports import survey as survey_report

CLASSES, D, TRAIN = 4, 6, 90
RECORD = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}
SECURE = {"aggregator": "secagg"}


def drawn(n=120):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, n)
    x = (rng.standard_normal((n, D)) + 2 * np.eye(CLASSES, D)[y]).astype(np.float32)
    return x, y, np.array(["a", "b", "c", "d"])[rng.integers(0, 4, n)]


X, Y, WHERE = drawn()
UNIT = X.astype(np.float64) / np.linalg.norm(X.astype(np.float64), axis=1, keepdims=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("survey") / "rows.npz"
    split = np.where(np.arange(len(Y)) < TRAIN, "train", "test")
    np.savez(path, x=X, y=Y, split=split, domain=WHERE)
    return path


def tables(place, *, privacy=None, run=None, **method):
    return {
        "data": {"path": str(place), "partition": {"name": "by_column", "column": "domain"}},
        "model": {"name": "features"},
        "method": {"name": "survey", "min_count": 1} | method,
        "run": {"workers": 1, "seed": 1} | (run or {}),
    } | ({"privacy": privacy} if privacy else {})


def figures_of_run(made, folder):
    result = fedfm.run(made, folder)
    return result, result["details"]["survey"]


def by_hand(x, owner):
    """Share of the spread of vectors x (n, d) that the owner explains, and the same without chance, from the rows."""
    n, names = len(x), np.unique(owner)
    total = ((x - x.mean(0)) ** 2).sum()
    within = sum(((x[owner == k] - x[owner == k].mean(0)) ** 2).sum() for k in names)
    return 1 - within / total, max(1 - (within / (n - len(names))) / (total / (n - 1)), 0.0)


# --- the figures of a run ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [{}, {"by_silo": True}, {"privacy": SECURE}], ids=["mean", "by_silo", "secure"])
def test_figures_of_a_run_are_those_of_the_pooled_rows(place, tmp_path, how):
    result, found = figures_of_run(tables(place, **how), tmp_path / "run")
    owner, y, x = WHERE[:TRAIN], Y[:TRAIN], UNIT[:TRAIN]
    assert (found["silos"], found["rows"], result["epsilon"]) == (4, TRAIN, None)
    assert found["counts"]["targets"]["counts"] == np.bincount(y).tolist()
    norms, _ = np.histogram(np.linalg.norm(X[:TRAIN], axis=1), [0, 0.1, 1, 10, 100, 1000, np.inf])
    assert found["counts"]["norm"]["counts"] == norms.tolist()
    digits = 1e-6 if how.get("by_silo") else 5.1e-3  # three where no figure shows single silos
    for about, of, near in ((found["counts"]["targets"], np.eye(CLASSES)[y], digits), (found["features"], x, 1e-6)):
        between, adjusted = by_hand(of, owner)
        assert about["between"] == pytest.approx(between, rel=near)
        assert about["adjusted"] == pytest.approx(adjusted, rel=near)
    shares = np.bincount(y) / TRAIN
    counts = np.array([np.bincount(y[owner == k], minlength=CLASSES) for k in np.unique(owner)])
    pairs = (counts * (counts - 1)).sum(1)  # Simpson's unbiased sum of squares, weighted by n_k - 1
    effective = found["counts"]["targets"]["effective_groups"]
    assert effective["silo"] == pytest.approx((TRAIN - 4) / (pairs / counts.sum(1)).sum(), rel=digits)
    assert effective["all"] == pytest.approx(1 / (1 - (1 - (shares**2).sum()) * TRAIN / (TRAIN - 1)), rel=1e-6)
    assert found["features"]["variance"] == pytest.approx(x.var(0).sum(), abs=1e-7)
    total = within = 0.0
    for c in range(CLASSES):
        mine = x[y == c]
        total += ((mine - mine.mean(0)) ** 2).sum()
        for k in np.unique(owner[y == c]):
            cell = x[(y == c) & (owner == k)]
            within += ((cell - cell.mean(0)) ** 2).sum()
    assert found["features"]["within_classes"]["between"] == pytest.approx(1 - within / total, abs=1e-7)
    state = fedfm.load_run(tmp_path / "run").state(Survey.state_type)
    assert json.loads(state.found)["features"]["mean"] == pytest.approx(x.mean(0).tolist(), abs=1e-8)


def test_the_share_between_silos_is_that_of_an_analysis_of_variance():
    """In one dimension: F = (between / (K - 1)) / (within / (n - K)), by scipy."""
    rng = np.random.default_rng(3)
    groups = [rng.normal(k / 3, 1, n) for k, n in enumerate((8, 20, 31))]
    x, owner = np.concatenate(groups), np.repeat([0, 1, 2], [8, 20, 31])
    between, _ = by_hand(x[:, None], owner)
    f = f_oneway(*groups).statistic
    n, k = len(x), 3
    assert between == pytest.approx(f * (k - 1) / (f * (k - 1) + n - k))


def test_a_silo_by_silo_distance_is_that_of_its_rows(place, tmp_path):
    _, found = figures_of_run(tables(place, by_silo=True), tmp_path / "run")
    owner, y, x = WHERE[:TRAIN], Y[:TRAIN], UNIT[:TRAIN]
    for name, about in found["by_silo"].items():
        mine = owner == name
        assert about["rows"] == mine.sum()
        apart = ((x[mine].mean(0) - x.mean(0)) ** 2).sum() / x.var(0).sum()
        assert about["features"] == pytest.approx(apart, abs=1e-9)
        shares = [np.bincount(part, minlength=CLASSES) / len(part) for part in (y[mine], y)]
        assert about["targets"] == pytest.approx(np.abs(shares[0] - shares[1]).sum() / 2)


@pytest.mark.parametrize("privacy", [None, SECURE])
def test_each_silo_learns_its_own_distance_and_the_server_a_histogram(place, tmp_path, privacy):
    _, found = figures_of_run(tables(place, privacy=privacy, tell_silos=True), tmp_path / "run")
    x, owner = UNIT[:TRAIN], WHERE[:TRAIN]
    apart = [((x[owner == k].mean(0) - x.mean(0)) ** 2).sum() / x.var(0).sum() for k in np.unique(owner)]
    counts, _ = np.histogram(apart, [0, 0.01, 0.03, 0.1, 0.3, 1.0, np.inf])
    assert found["silos_by_distance"]["counts"] == counts.tolist()


def test_same_seed_same_figures_whatever_runs_it(place, tmp_path):
    ways = ({"workers": 1}, {"workers": 2}, {"workers": 1, "wire": True})
    found = [fedfm.run(tables(place, run=run), tmp_path / str(i)) for i, run in enumerate(ways)]
    assert len({json.dumps(r["details"]["survey"]) for r in found}) == 1
    assert len({(r["bytes_up"], r["bytes_down"]) for r in found}) == 1


# --- the sums ---------------------------------------------------------------------------------------------------------
def block(name, x):
    return sums.SurveyBlock(name, (), x.shape[1], max(int(x.sum(1).max()), 1) if name != sums.FEATURES else 1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 2**31),
    st.integers(8, 60),
    st.sampled_from(["one", "several", "features"]),
)
def test_any_partition_has_the_figures_of_the_pooled_rows(silos, seed, n, kind):
    rng = np.random.default_rng(seed)
    if kind == "features":
        x = rng.standard_normal((n, 3))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    else:
        x = np.eye(4)[rng.integers(0, 4, n)] if kind == "one" else rng.integers(0, 2, (n, 4)).astype(float)
    owner = np.concatenate([np.arange(silos), rng.integers(0, silos, n)])[:n]  # every silo has a row
    name = sums.FEATURES if kind == "features" else "p"
    of = block(name, x)
    parts = [sums.sums_of({name: x[owner == k]}, int((owner == k).sum())) for k in np.unique(owner)]
    total = {key: np.sum([part[key] for part in parts], axis=0) for key in parts[0]}
    assert sums.fault_of(total, (of,), len(parts), 1000) is None
    assert all(sums.fault_of(part, (of,), 1, 1000) is None for part in parts)
    about = figures._drift(of, total[f"{name}.sum"], float(total[f"{name}.within"][0]), n, len(parts), None)
    spread = ((x - x.mean(0)) ** 2).sum()
    assert of.total_spread(total[f"{name}.sum"], n) == pytest.approx(spread, abs=1e-9)
    if about["between"] is not None:
        between, adjusted = by_hand(x, owner)
        assert about["between"] == pytest.approx(max(between, 0), abs=1e-8)
        assert about["adjusted"] == pytest.approx(adjusted, abs=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(1, 5), st.booleans())
def test_a_row_more_changes_a_noisy_message_by_at_most_1(seed, n, most, far):
    """For the worst rows, too: features opposite to all others, and groups that no other row has."""
    rng = np.random.default_rng(seed)
    d = 3
    x = rng.standard_normal((n + 1, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    groups = (rng.random((n + 1, most)) < 0.5).astype(float)
    one = np.eye(3)[rng.integers(0, 3, n + 1)]
    if far:
        x[:], x[n] = [1.0, 0, 0], [-1.0, 0, 0]
        groups[:], groups[n] = 0.0, 1.0
        one[:], one[n] = [1.0, 0, 0], [0, 0, 1.0]
    blocks = (
        sums.SurveyBlock("g", (), most, most),
        sums.SurveyBlock("o", (), 3, 1),
        sums.SurveyBlock(sums.FEATURES, (), d, 1),
    )
    members = {"g": groups, "o": one, sums.FEATURES: x}
    both = [sums.scaled_sums({key: v[:m] for key, v in members.items()}, m, blocks) for m in (n, n + 1)]
    apart = math.sqrt(sum(((both[1][key] - both[0][key]) ** 2).sum() for key in both[0]))
    assert apart <= 1.0
    for value in both[1].values():  # on the lattice of shared noise
        assert np.array_equal(np.rint(value / 2.0**-24) * 2.0**-24, value)
    back = sums.unscaled_sums(both[1], blocks)
    exact = sums.sums_of(members, n + 1)
    for key, value in back.items():
        assert value == pytest.approx(exact[key], abs=1e-3)


def test_a_far_row_comes_near_the_stated_sensitivity():
    """The bound is not a waste: a row opposite to many others spends more than half of it."""
    n = 1000
    x = np.tile([1.0, 0.0], (n + 1, 1))
    x[n] = [-1.0, 0.0]
    blocks = (sums.SurveyBlock(sums.FEATURES, (), 2, 1),)
    both = [sums.scaled_sums({sums.FEATURES: x[:m]}, m, blocks) for m in (n, n + 1)]
    apart = math.sqrt(sum(((both[1][key] - both[0][key]) ** 2).sum() for key in both[0]))
    assert 0.99 < apart <= 1.0


# --- noise ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("epsilon", [0.5, 4.0])
def test_the_noise_is_that_of_the_gaussian_mechanism(epsilon):
    sigma = SurveyNoise(epsilon, 1e-5).sigma
    assert delta_of(sigma, 1.0, epsilon) <= 1e-5 < delta_of(0.999 * sigma, 1.0, epsilon)


@pytest.mark.parametrize(
    "privacy", [RECORD, RECORD | SECURE | {"mechanism": "distributed_gaussian"}], ids=["own", "shares"]
)
def test_a_run_with_noise_states_its_epsilon_and_its_counts_are_off_by_the_noise(place, tmp_path, privacy):
    result, found = figures_of_run(tables(place, privacy=privacy | {"target_epsilon": 1.0}), tmp_path / "run")
    assert result["epsilon"] == 1.0
    deviation = found["noise"]["deviation_of_counts"]
    off = np.array(found["counts"]["targets"]["counts"]) - np.bincount(Y[:TRAIN])
    assert 0 < np.abs(off).max() < 6 * deviation
    assert "within_classes" not in found.get("features", {})
    again = fedfm.run(tables(place, privacy=privacy | {"target_epsilon": 1.0}), tmp_path / "again")
    assert again["details"]["survey"]["counts"] != found["counts"]  # the key is another one


def test_noise_has_the_stated_deviation(monkeypatch):
    """Over 400 releases of the same sums under different keys."""
    blocks = (sums.SurveyBlock("o", (), 3, 1),)
    members = {"o": np.eye(3)[np.arange(60) % 3]}
    noise, method = SurveyNoise(2.0, 1e-5), Survey()
    found = sums.scaled_sums(members, 60, blocks)
    off = []
    for k in range(400):
        client = SimpleNamespace(
            id="c",
            secret=lambda name, k=k: k.to_bytes(32, "little"),
            write_once=lambda name, value: value,
            log=lambda text: None,
        )
        noisy = sums.unscaled_sums(method._noisy(client, members, dict(found), noise), blocks)
        off.append(noisy["o.sum"][0] - 20)
    expected = method._deviations(blocks, 1, noise)["count"]
    assert np.std(off) == pytest.approx(expected, rel=0.12)
    assert abs(np.mean(off)) < 4 * expected / math.sqrt(400)


# --- thresholds and false sums ----------------------------------------------------------------------------------------
@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 12), st.integers(0, 30))
def test_hidden_counts_do_not_follow_from_the_others(counts, least, outside):
    rows = sum(counts) + outside
    shown = figures._hide(np.array(counts, float), float(rows), least, None)
    hidden = [n for n, s in zip(counts, shown, strict=True) if s is None]
    assert all(s is None or s == n for n, s in zip(counts, shown, strict=True))
    assert not [s for s in shown if s is not None and 0 < s < least]
    if hidden and min(hidden) < least:
        rest = rows - sum(s for s in shown if s is not None)  # what a reader computes
        everything = all(s is None or not s for s in shown)
        assert rest >= least or everything
        assert rest > min(hidden) or everything


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=1, max_size=3), st.integers(2, 10))
def test_figures_do_not_depend_on_hidden_counts(silos, least):
    """One sum of squares beside the sum of two counts would determine both. Of one silo nothing else is known either;
    of several, the spread within them is told in three digits."""
    counts = np.array(silos, float)
    block = sums.SurveyBlock(sums.TARGETS, tuple("wxyz"), 4, 1)

    def published_counts(counts):
        members = [np.repeat(np.eye(4), row.astype(int), axis=0) for row in counts]
        parts = [sums.sums_of({block.name: x}, len(x)) for x in members if len(x)]
        total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
        return figures.figures_of(total, (block,), len(parts), least, None)["counts"][block.name]

    if not counts.sum():
        return
    found = published_counts(counts)
    hidden = [j for j, n in enumerate(found["counts"]) if n is None]
    if not hidden or found["between"] is None:
        return
    assert all(found[key] is None or found[key] == float(f"{found[key]:.3g}") for key in ("between", "adjusted"))
    one = counts.sum(0, keepdims=True)
    other = one.copy()
    other[0, hidden] = other[0, hidden[::-1]]  # the same rows in other hidden groups
    j, k = hidden[0], hidden[-1]
    if other[0, j] > 1:
        other[0, [j, k]] += [-1, 1]
    if published_counts(one)["counts"] == published_counts(other)["counts"]:
        assert published_counts(one) == published_counts(other)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=2, max_size=4), st.booleans())
def test_no_count_of_a_silo_follows_from_the_drift(silos, by_silo):
    """Of two silos and two groups, rows, counts and an exact drift determine the counts of both."""
    block = sums.SurveyBlock(sums.TARGETS, ("no", "yes"), 2, 1)
    parts = [sums.sums_of({block.name: np.repeat(np.eye(2), row, axis=0)}, sum(row)) for row in silos]
    total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    found = figures.figures_of(total, (block,), len(silos), 1, None, by_silo=by_silo)
    about = found["counts"][block.name]
    drift = [about["between"], about["adjusted"], about["effective_groups"]["silo"]]
    exact = figures._drift(
        block,
        total[f"{block.name}.sum"],
        float(total[f"{block.name}.within"][0]),
        sum(map(sum, silos)),
        len(silos),
        None,
    )
    if by_silo:  # each silo is shown anyway
        assert drift[:2] == [exact["between"], exact["adjusted"]]
    elif len(silos) == 2:
        assert drift == [None] * 3
        assert "determine the counts of both silos" in survey_report.summary(found)
    else:
        assert all(value is None or value == float(f"{value:.3g}") for value in drift)
        assert about["between"] == pytest.approx(exact["between"], rel=5.1e-3)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(10, 60)), min_size=2, max_size=5), st.integers(2, 10))
def test_no_small_count_of_a_silo_follows_from_distances(silos, least):
    """Two classes, so that a distance has one unknown: the counts that fit a silo's distance are more than one."""
    blocks = (sums.SurveyBlock(sums.TARGETS, ("no", "yes"), 2, 1),)
    counts = {str(k): np.array(c, dtype=float) for k, c in enumerate(silos)}
    parts = {
        k: sums.sums_of({sums.TARGETS: np.repeat(np.eye(2), c.astype(int), 0)}, c.sum()) for k, c in counts.items()
    }
    shown = figures.silo_figures(parts, blocks, least)
    share = sum(counts.values()) / sum(c.sum() for c in counts.values())
    if not any(0 < c[0] < least for c in counts.values()):
        for k, c in counts.items():
            assert shown[k][sums.TARGETS] == pytest.approx(abs(c / c.sum() - share).sum() / 2)
        return
    for k, c in counts.items():
        n, step = c.sum(), least / c.sum()
        fits = [
            m
            for m in range(int(n) + 1)
            if abs(round(abs(m / n - share[0]) / step) * step - shown[k][sums.TARGETS]) < 1e-9
        ]
        assert c[0] in fits
        assert len(fits) > 1 or shown[k][sums.TARGETS] == 1


def test_a_silo_of_few_rows_sends_zeros_and_small_counts_are_hidden(place, tmp_path):
    sizes = {k: int((WHERE[:TRAIN] == k).sum()) for k in "abcd"}
    least = sorted(sizes.values())[1]  # one silo is below
    _, found = figures_of_run(tables(place, min_count=least, by_silo=True), tmp_path / "run")
    small = min(sizes, key=sizes.get)
    assert found["silos"] == 3
    assert found["silos_without_sums"] == 1
    assert found["rows"] == TRAIN - sizes[small]
    assert found["by_silo"][small] == {"rows": None}
    counts = np.bincount(Y[:TRAIN][WHERE[:TRAIN] != small])
    assert all(n is None or n >= least or n == 0 for n in found["counts"]["targets"]["counts"])
    assert [n for n, c in zip(found["counts"]["targets"]["counts"], counts, strict=True) if n not in (None, c)] == []


FALSE = {
    "negative": lambda w: {"targets.sum": -w["targets.sum"]},
    "more than its rows": lambda w: {"targets.sum": 5 * w["targets.sum"]},
    "a long mean": lambda w: {"features.sum": 100 * w["features.sum"]},
    "another spread": lambda w: {"targets.within": w["targets.within"] + 3},
    "a smaller spread": lambda w: {"features.within": 0.5 * w["features.within"]},
    "too many rows": lambda w: {"rows": w["rows"] + 1e8},
    "two silos": lambda w: {"silos": 2 * w["silos"]},
    "no silo": lambda w: {"silos": 0 * w["silos"]},
    "cells": lambda w: {"features_by_class.cells": w["features_by_class.cells"] + 9},
    "a class": lambda w: {"features_by_class.sum": 9 * w["features_by_class.sum"]},
}


@pytest.mark.parametrize("lie", FALSE)
@pytest.mark.parametrize("by_silo", [True, False])
def test_a_silo_that_sends_sums_of_no_rows_is_left_out(place, tmp_path, monkeypatch, lie, by_silo):
    real = Survey._message

    def message(self, client):
        w = real(self, client)
        return w.replace(type(w)(FALSE[lie](w))) if client.id == "b" else w

    monkeypatch.setattr(Survey, "_message", message)
    result, found = figures_of_run(tables(place, by_silo=by_silo), tmp_path / "run")
    assert [(e["client"], e["code"]) for e in result["excluded"]] == [("b", "E_FIELD")]
    assert found["counts"]["targets"]["counts"] == np.bincount(Y[:TRAIN][WHERE[:TRAIN] != "b"]).tolist()


@pytest.mark.parametrize("lie", ["negative", "a long mean", "too many rows"])
def test_hidden_sums_that_no_rows_have_end_the_survey_in_one_line(place, tmp_path, monkeypatch, lie):
    real = Survey._message

    def message(self, client):
        w = real(self, client)
        return w.replace(type(w)({k: 30 * v for k, v in FALSE[lie](w).items()})) if client.id == "b" else w

    monkeypatch.setattr(Survey, "_message", message)
    if lie == "too many rows":  # above the bound of secure aggregation
        _, found = figures_of_run(tables(place, privacy=SECURE), tmp_path / "run")
        assert (found["silos"], found["silos_without_sums"]) == (3, 0)
        assert found["rows"] == (WHERE[:TRAIN] != "b").sum()
        return
    with pytest.raises(RunError, match=r"a silo sent false sums: .* it would be left out") as error:
        fedfm.run(tables(place, privacy=SECURE), tmp_path / "run")
    assert "\n" not in error.value.args[0]


# --- settings ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "privacy", "says"),
    [
        ({"length_bins": [8, 8]}, None, "expected ascending edges"),
        ({"norm_bins": [2.0, 1.0]}, None, "expected ascending edges"),
        ({"rounds": 2}, None, "one round"),
        ({"by_silo": True}, SECURE, "looks at single replies"),
        ({"by_silo": True}, RECORD, "one release of sums"),
        ({"tell_silos": True}, RECORD, "one release of sums"),
        ({"tell_silos": True, "features": False}, None, "features = true"),
        ({}, {"unit": "client", "target_epsilon": 1.0, "delta": 1e-5}, 'protects a "record"'),
        ({}, RECORD | {"mechanism": "dp_sgd"}, "gaussian"),
        ({}, RECORD | {"mechanism": "distributed_gaussian"}, "secagg"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(place, method, privacy, says):
    with pytest.raises(InputError, match=says) as error:
        Experiment.from_dict(tables(place, privacy=privacy, **method))
    assert "\n" not in str(error.value)


def test_hidden_sums_of_one_silo_alone_are_no_survey(tmp_path):
    rng, clients = np.random.default_rng(0), {}
    for name, count in (("a", 40), ("b", 4), ("c", 5)):  # b and c have fewer rows than min_count
        y = np.arange(count) % 2
        np.savez(tmp_path / f"{name}.npz", x=rng.normal(size=(count, 4)).astype(np.float32), y=y, classes=["p", "q"])
        clients[name] = str(tmp_path / f"{name}.npz")
    tables = {"data": {"clients": clients}, "model": {"name": "features"}, "run": {"workers": 1}}
    tables["privacy"] = {"aggregator": "secagg"}
    with pytest.raises(RunError, match=r"one silo alone has method\.min_count"):
        fedfm.survey(tables, tmp_path / "run", progress=fedfm.Progress())
