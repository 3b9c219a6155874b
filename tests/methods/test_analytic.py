"""Analytic: sums of any partition give the ridge regression that scikit-learn fits to the pooled rows."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

import fedfm
from fedfm import seeds
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.analytic import Analytic, Noise, _sums_of
from fedfm.privacy.gaussian import delta_of
from fedfm.privacy.noise import packed_scale, unit_rows
from fedfm.runtime.run_directory import Run

CLASSES, D, TRAIN = 4, 6, 90
RECORD = {"unit": "record", "target_epsilon": 8.0, "delta": 1e-5}


def drawn(n=120):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, n)
    return (rng.standard_normal((n, D)) + 2 * np.eye(CLASSES, D)[y]).astype(np.float32), y


X, Y = drawn()
SETS = np.stack([Y % 2 == 0, Y < 2], 1).astype(np.uint8)
NUMBERS = (X @ np.arange(1, D + 1) + 3).astype(np.float64)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("analytic")
    split = np.where(np.arange(len(Y)) < TRAIN, "train", "test")
    for name, more in {
        "classification": {"y": Y},
        "multi_label": {"y": SETS, "classes": np.array(["even", "low"])},
        "regression": {"y": NUMBERS},
    }.items():
        np.savez(place / f"{name}.npz", x=X, split=split, **more)
    return place


def tables(place, task="classification", *, clients=5, alpha=0.2, privacy=None, **method):
    how = {"name": "dirichlet", "alpha": alpha} if task == "classification" else {"name": "iid"}
    return {
        "data": {"path": str(place / f"{task}.npz"), "partition": how | {"clients": clients}},
        "model": {"name": "features", "task": task},
        "method": {"name": "analytic"} | method,
        "run": {"workers": 1, "seed": 1},
    } | ({"privacy": privacy} if privacy else {})


def head(run):
    """W (C, d) and b (C,) at the end of a run."""
    w = Run.open(run).state(Params)
    return w["head.weight"].double().numpy(), w["head.bias"].double().numpy()


def inputs(x):
    return torch.cat([torch.from_numpy(x).double(), torch.ones(len(x), 1)], 1)


@given(st.lists(st.integers(0, 4), min_size=60, max_size=60), st.sampled_from([1e-3, 1.0, 50.0]))
@settings(max_examples=25, deadline=None)
def test_every_partition_gives_the_pooled_solution(owners, ridge):
    x, one_hot, owners = X[:60], np.eye(CLASSES)[Y[:60]], np.array(owners)
    parts = [
        _sums_of(inputs(x[owners == k]), torch.from_numpy(one_hot[owners == k]), torch.ones(1)) for k in set(owners)
    ]
    C, b = (sum(part[name].numpy() for part in parts) for name in ("C", "b"))
    W, intercept = Analytic(ridge=ridge).solve(C, b)
    pooled = Ridge(alpha=ridge).fit(x.astype(np.float64), one_hot)
    np.testing.assert_allclose(W, pooled.coef_, atol=1e-8)
    np.testing.assert_allclose(intercept, pooled.intercept_, atol=1e-8)


@pytest.mark.parametrize(
    ("task", "targets"),
    [
        ("classification", np.eye(CLASSES)[Y]),
        ("multi_label", 2.0 * SETS - 1),
        ("regression", ((NUMBERS - NUMBERS[:TRAIN].mean()) / NUMBERS[:TRAIN].std())[:, None]),
    ],
)
def test_a_run_fits_the_targets_of_its_task(place, task, targets, tmp_path):
    fedfm.run(tables(place, task, ridge=2.0), tmp_path)
    pooled = Ridge(alpha=2.0).fit(X[:TRAIN].astype(np.float64), targets[:TRAIN])
    W, b = head(tmp_path)
    np.testing.assert_allclose(W, np.atleast_2d(pooled.coef_), atol=2e-6)
    np.testing.assert_allclose(b, pooled.intercept_, atol=2e-6)


def test_secure_sums_give_the_same_head(place, tmp_path):
    clear = fedfm.run(tables(place), tmp_path / "clear")
    hidden = fedfm.run(tables(place, privacy={"aggregator": "secagg"}), tmp_path / "hidden")
    assert hidden["accuracy"] == clear["accuracy"]
    for a, b in zip(head(tmp_path / "clear"), head(tmp_path / "hidden"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_balanced_classes_weigh_the_same(place, tmp_path):
    fedfm.run(tables(place, class_weights="balanced"), tmp_path)
    y = Y[:TRAIN]
    weights = TRAIN / (CLASSES * np.bincount(y)[y])
    pooled = Ridge(alpha=1.0).fit(X[:TRAIN].astype(np.float64), np.eye(CLASSES)[y], sample_weight=weights)
    np.testing.assert_allclose(head(tmp_path)[0], pooled.coef_, atol=2e-6)


def test_random_features_are_those_of_the_runs_seed_and_predict(place, tmp_path):
    result = fedfm.run(tables(place, features="random", width=20), tmp_path)
    w = Run.open(tmp_path).state(Params)
    drawn = seeds.generator(int(w["seed"]), "random features").standard_normal((D, 20)) / math.sqrt(D)
    x = np.maximum(X.astype(np.float64) @ drawn, 0)
    pooled = Ridge(alpha=1.0).fit(x[:TRAIN], np.eye(CLASSES)[Y[:TRAIN]])
    np.testing.assert_allclose(w["weight"].numpy(), pooled.coef_, atol=1e-5)
    right = pooled.predict(x[TRAIN:]).argmax(1) == Y[TRAIN:]
    assert result["accuracy"] == right.mean()
    answer = fedfm.predict(tmp_path, place / "classification.npz")
    assert list(answer["predictions"]) == [str(c) for c in pooled.predict(x).argmax(1)]


def test_fewer_rows_than_features_without_ridge_give_the_shortest_solution():
    x = inputs(X[:3])
    y = torch.eye(CLASSES, dtype=torch.float64)[:3]
    sums = _sums_of(x, y, torch.ones(1))
    W, b = Analytic(ridge=0.0).solve(sums["C"].numpy(), sums["b"].numpy())
    np.testing.assert_allclose(np.column_stack([W, b]).T, np.linalg.pinv(x.numpy()) @ y.numpy(), atol=1e-6)


# --- privacy ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=D, max_size=D), st.integers(0, CLASSES - 1))
@settings(max_examples=50, deadline=None)
def test_a_row_changes_the_sums_by_at_most_their_sensitivity(row, label):
    method = Experiment.from_dict(
        {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "analytic"}, "privacy": RECORD}
    ).method
    x = method._inputs(torch.tensor([row], dtype=torch.float64), 0)
    sums = _sums_of(x, torch.eye(CLASSES, dtype=torch.float64)[[label]], torch.ones(1))
    distance = np.hypot(np.linalg.norm(sums["C"].numpy() / packed_scale(D + 1)), np.linalg.norm(sums["b"].numpy()))
    assert distance == pytest.approx(math.sqrt(2))


def test_a_private_run_states_its_epsilon_and_its_head_takes_unit_features(place, tmp_path):
    result = fedfm.run(tables(place, clients=1, alpha=100.0, privacy=RECORD | {"target_epsilon": 2000.0}), tmp_path)
    assert result["epsilon"] == 2000.0
    unit = unit_rows(X.astype(np.float64))
    W, b = head(tmp_path)
    assert result["accuracy"] == ((unit @ W.T + b).argmax(1) == Y)[TRAIN:].mean()
    noise = Noise(2000.0, 1e-5).sigma
    x = np.column_stack([unit, np.ones(len(unit))])[:TRAIN] / math.sqrt(2)
    want = np.linalg.solve(
        x.T @ x + max(1.0, noise * math.sqrt(2 * (D + 1))) * np.eye(D + 1), x.T @ np.eye(CLASSES)[Y[:TRAIN]]
    )
    np.testing.assert_allclose(W, want[:-1].T / math.sqrt(2), atol=10 * noise)


def test_the_noise_has_its_standard_deviation(place):
    method = Experiment.from_dict(tables(place, privacy=RECORD)).method
    x, y = method._inputs(torch.from_numpy(X), 0), torch.eye(CLASSES, dtype=torch.float64)[Y]
    exact, found = _sums_of(x, y, torch.ones(1)), []
    for number in range(40):
        client = SimpleNamespace(id="c", write_once=lambda name, value: value, log=print)
        client.secret = lambda name, key=bytes([number]) * 32: key
        sent = method._noisy(client, x, y, method.noise)
        found += [(sent["C"] - exact["C"]).numpy() / packed_scale(D + 1), (sent["b"] - exact["b"]).numpy().ravel()]
    assert np.std(np.concatenate(found)) == pytest.approx(method.noise.sigma, rel=0.05)
    assert delta_of(method.noise.sigma, math.sqrt(2), 8.0) == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("privacy", "method", "words"),
    [
        ({"unit": "client"}, {}, 'analytic protects a "record"'),
        ({"mechanism": "distributed_gaussian"}, {}, 'analytic has "gaussian"'),
        ({}, {"class_weights": "balanced"}, 'expected "none"'),
    ],
)
def test_what_the_noise_does_not_cover_is_refused(place, privacy, method, words):
    with pytest.raises(InputError, match=words):
        Experiment.from_dict(tables(place, privacy=RECORD | privacy, **method))


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("multi_label", {"privacy": RECORD}, r"\[privacy\] of method .analytic. computes with the class of each row"),
        ("multi_label", {"class_weights": "balanced"}, 'method.class_weights = "balanced" computes with the class'),
        ("language_modelling", {}, "fits a linear head to one vector of targets per row"),
        ("token_classification", {}, "fits a linear head to one vector of targets per row"),
    ],
)
def test_tasks_without_the_targets_it_needs_are_refused(place, task, settings, words):
    with pytest.raises(InputError, match=words):
        Experiment.from_dict(tables(place, task, **settings))
