"""Analytic: sums of any partition give the ridge regression that scikit-learn fits to the pooled rows."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sklearn.linear_model import Ridge

import fedfm
from fedfm import seeds
from fedfm.api.predict import load
from fedfm.config.experiment import Experiment
from fedfm.errors import ClientFault, InputError, RunError
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


def test_projected_features_give_one_head_by_smaller_sums(place, tmp_path):
    result = fedfm.run(tables(place, features="projected", width=3), tmp_path / "run")
    whole = fedfm.run(tables(place), tmp_path / "whole")
    assert result["bytes_up"] < whole["bytes_up"]
    seed = int(Run.open(tmp_path / "run").state(Params)["sums.seed"])
    drawn = seeds.generator(seed, "random features").standard_normal((D, 3)) / math.sqrt(D)
    x = X.astype(np.float64)
    pooled = Ridge(alpha=1.0).fit(x[:TRAIN] @ drawn, np.eye(CLASSES)[Y[:TRAIN]])
    W, b = head(tmp_path / "run")
    np.testing.assert_allclose(W, pooled.coef_ @ drawn.T, atol=1e-5)
    np.testing.assert_allclose(b, pooled.intercept_, atol=1e-5)
    right = (x @ W.T + b).argmax(1)
    assert result["accuracy"] == (right == Y)[TRAIN:].mean()
    fedfm.export(tmp_path / "run", "torch", tmp_path / "exported")


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
        ({"mechanism": "correlated_gaussian"}, {}, 'analytic has "gaussian"'),
        ({"mechanism": "distributed_gaussian"}, {}, 'set aggregator = "secagg"'),
        ({}, {"class_weights": "balanced"}, 'expected "none"'),
    ],
)
def test_settings_that_the_noise_does_not_cover_are_refused(place, privacy, method, words):
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


# --- shares of the noise ----------------------------------------------------------------------------------------------

SHARED = RECORD | {"mechanism": "distributed_gaussian", "aggregator": "secagg"}


def test_the_sum_has_the_noise_of_one_release_for_any_number_of_clients(place, tmp_path):
    """The noise on the server's sums has sigma^2 n / t, t the fewest clients whose sum can be unmasked."""
    for clients in (4, 9):
        run = tmp_path / f"{clients}"
        fedfm.run(tables(place, clients=clients, alpha=100.0, privacy=SHARED), run)
        state, method = Run.open(run).state(Params), Run.open(run).experiment.method
        x = method._inputs(torch.from_numpy(X[:TRAIN]), 0)
        exact = _sums_of(x, torch.eye(CLASSES, dtype=torch.float64)[Y[:TRAIN]], torch.ones(1))
        noise = np.concatenate([(state[f"sums.{n}"] - exact[n]).numpy().ravel() for n in ("C", "b")])
        least = math.floor(0.67 * clients) + 1
        assert np.sqrt((noise**2).mean()) == pytest.approx(method.noise.sigma * math.sqrt(clients / least), rel=0.4)
        assert len(noise) == 56


def test_shares_spend_their_target_by_the_accounting_of_discrete_noise(place, tmp_path):
    from fedfm.privacy.composition import epsilon_of_concentrated

    result = fedfm.run(tables(place, privacy=SHARED), tmp_path)
    sigma = Run.open(tmp_path).experiment.method.noise.sigma
    assert result["epsilon"] == 8.0
    assert epsilon_of_concentrated(2 / (2 * sigma**2), 1e-5) == pytest.approx(8.0, rel=1e-6)
    assert delta_of(sigma, math.sqrt(2), 8.0) <= 1e-5  # exact accounting of the Gaussian mechanism needs no more noise
    entry = Run.open(tmp_path).manifest["ledger"]["entries"][-1]
    assert entry["mechanism"] == "Gaussian, analytic, by the clients"


@pytest.mark.proof
@given(st.lists(st.floats(-1e6, 1e6), min_size=D, max_size=D), st.integers(0, CLASSES - 1))
@settings(max_examples=50, deadline=None)
def test_rows_on_the_lattice_have_exact_products_and_keep_the_sensitivity(row, label):
    from fedfm.aggregation._record_shares import STEP

    method = Experiment.from_dict(
        {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "analytic"}, "privacy": SHARED}
    ).method
    x = method._inputs(torch.tensor([row], dtype=torch.float64), 0)
    sums = _sums_of(x, torch.eye(CLASSES, dtype=torch.float64)[[label]], torch.ones(1))
    for part in sums.values():
        assert torch.equal(part, (part / STEP).round() * STEP)
    assert np.hypot(np.linalg.norm(sums["C"].numpy()), np.linalg.norm(sums["b"].numpy())) <= math.sqrt(2)


def test_a_client_adds_its_share_to_one_sum_of_a_run(place):
    """Two sums of different clients differ by one client's part under its share alone."""
    from fedfm.aggregation._record_shares import RecordShares
    from fedfm.aggregation._secagg import MEMORY
    from fedfm.aggregation._secagg_session import Sum
    from fedfm.core.client import Update

    store = {}
    client = SimpleNamespace(id="c", memory={MEMORY: {"session": "s"}}, secret=lambda name: bytes(32))
    client.write_once = lambda name, value: store.setdefault(name, value)
    client.aggregation_message = Sum(0, torch.ones(4, dtype=torch.uint8), 3)
    shares, update = RecordShares(5.0, 0.67), Update(Params({"C": torch.zeros(3).double()}), 1.0)
    first = shares.bound(client, update)
    assert torch.equal(shares.bound(client, update).delta["C"], first.delta["C"])  # the same message, again
    assert torch.equal(shares.blank(client).delta[""], first.delta["C"])
    client.aggregation_message = Sum(1, torch.tensor([1, 1, 1, 0], dtype=torch.uint8), 3)
    with pytest.raises(ClientFault, match="second sum of the same rows"):
        shares.bound(client, update)
    with pytest.raises(ValueError, match="lattice"):
        shares.bound(client, Update(Params({"C": torch.full((3,), 0.1).double()}), 1.0))


@pytest.mark.parametrize(
    "setting", [{"compact": True}, {"clip_norm": 1.0}, {"bound": 2.0**65}, {"bound": 1.0}], ids=lambda s: str(s)
)
def test_sums_that_would_not_keep_the_noise_are_refused(place, setting):
    """With a bound of 2^65 each client would round its numbers, and the noise, to 0 or to multiples of 40."""
    aggregation, noisy = {"name": "secure"} | setting, RECORD | {"mechanism": "distributed_gaussian"}
    with pytest.raises(InputError, match=f"aggregation.{next(iter(setting))}"):
        Experiment.from_dict(tables(place, privacy=noisy) | {"aggregation": aggregation})


@pytest.mark.parametrize("privacy", [None, RECORD, SHARED])
@pytest.mark.parametrize("weights", [[1.0] * CLASSES, [1024.0] * CLASSES, [0.5]])
def test_a_server_cannot_weight_classes_where_the_method_weights_none(place, privacy, weights):
    """Weights scale the rows: under noise whose size does not change, the release would cost more than its epsilon."""
    method = Experiment.from_dict(tables(place, privacy=privacy)).method
    client = SimpleNamespace(model=SimpleNamespace(classes=tuple("0123")))  # refused before rows are read
    with pytest.raises(ClientFault, match="expected 0 numbers"):
        method.sums(client, seed=0, weights=torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, -1.0]])
def test_weights_of_classes_are_positive_and_one_a_class(place, weights):
    method = Experiment.from_dict(tables(place, class_weights="balanced")).method
    client = SimpleNamespace(model=SimpleNamespace(classes=tuple("0123")))
    with pytest.raises(ClientFault, match="expected 4 numbers above 0"):
        method.sums(client, seed=0, weights=torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("scale", [-5.0, -1e4])
def test_sums_of_no_rows_end_the_run_in_one_line(place, scale, monkeypatch, tmp_path):
    """A client that lies sends a matrix that no rows have; its solution would be a model of nothing."""
    sums = Analytic.sums

    @functools.wraps(sums)
    def lie(self, client, *, seed, weights):
        found = sums(self, client, seed=seed, weights=weights)
        return replace(found, delta=(scale if client.id == "client-01" else 1.0) * found.delta)

    monkeypatch.setattr(Analytic, "sums", lie)
    hidden = {"privacy": {"aggregator": "secagg"}}
    with pytest.raises(RunError, match="no rows can have the clients' sums"):
        fedfm.run(tables(place, clients=3, alpha=100.0) | hidden, tmp_path)


@pytest.mark.parametrize("count", [0.0, -100.0])
def test_numbers_of_rows_below_zero_end_the_run_in_one_line(place, count, monkeypatch, tmp_path):
    from fedfm.core.client import Client, Update, on_client

    def lie(self, client: Client) -> Update:
        return Update(Params({"count": torch.full((CLASSES,), count).double()}), 1.0)

    lie.__name__ = "count"
    monkeypatch.setattr(Analytic, "count", on_client(lie))
    with pytest.raises(RunError, match="numbers of rows of classes" if count == 0 else "no rows can have"):
        fedfm.run(tables(place, class_weights="balanced"), tmp_path)


@pytest.mark.parametrize("kind", ["fewer rows than features", "equal features", "secure aggregation"])
def test_a_singular_matrix_of_true_rows_is_no_lie(place, kind, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 20)) if kind != "equal features" else np.repeat(rng.normal(size=(30, 3)), 4, axis=1)
    found = _sums_of(inputs(x.astype(np.float32)), torch.ones(len(x), 2).double(), torch.ones(1))
    method = Analytic(ridge=0.0)
    noise = 1e-9 * rng.normal(size=found["C"].shape) if kind == "secure aggregation" else 0.0
    W, b = method.solve(found["C"].numpy() + noise, found["b"].numpy())
    assert x @ W.T + b == pytest.approx(1.0, abs=1e-3)


# --- a client that joins later ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("classification", {}),
        ("classification", {"features": "projected", "width": 3}),
        ("multi_label", {}),
    ],
)
def test_two_newcomers_give_the_solution_of_all_rows(place, task, method, tmp_path):
    """Compared with scikit-learn on the rows of everybody, and the state's sums to 1e-8."""
    x, y = (X[:TRAIN], {"classification": Y, "multi_label": SETS}[task][:TRAIN])
    more = {"classes": np.array(["even", "low"])} if task == "multi_label" else {"classes": np.array(list("0123"))}
    for name, part in {"a": slice(0, 50), "b": slice(50, 70), "c": slice(70, 90)}.items():
        split = np.where(np.arange(len(y[part])) % 10 == 9, "test", "train")
        np.savez(tmp_path / f"{name}.npz", x=x[part], y=y[part], split=split, **more)
    base = tables(place, task, **method)
    fedfm.run(base | {"data": {"clients": {"a": str(tmp_path / "a.npz")}}}, tmp_path / "run")
    for name in ("b", "c"):
        found = fedfm.join(tmp_path / "run", tmp_path / f"{name}.npz", name)
        assert found["how"] == "sums"
    everybody = {"data": {"clients": {n: str(tmp_path / f"{n}.npz") for n in "abc"}}}
    fedfm.run(base | everybody, tmp_path / "all")
    joined, whole = load(tmp_path / "run", "c")[2], load(tmp_path / "all")[2]
    for name, tensor in whole.items():
        np.testing.assert_allclose(joined[name].numpy(), tensor.numpy(), atol=1e-7)
    sums = load_file(Run.open(tmp_path / "run").adapter("c") / "sums.safetensors")
    state = Run.open(tmp_path / "all").state(Params)
    for part in ("sums.C", "sums.b"):
        np.testing.assert_allclose(sums[part], state[part], rtol=1e-12, atol=1e-8)
    targets = np.eye(CLASSES)[y] if task == "classification" else 2.0 * y - 1
    train = np.concatenate([[i for i in range(*p) if (i - p[0]) % 10 != 9] for p in ((0, 50), (50, 70), (70, 90))])
    features = x.astype(np.float64)
    if "features" in method:
        drawn = seeds.generator(int(state["sums.seed"]), "random features").standard_normal((D, method["width"]))
        features = features @ drawn / math.sqrt(D)
    pooled = Ridge(alpha=1.0).fit(features[train], targets[train])
    W, b = Run.open(tmp_path / "run").experiment.method.solve(sums["sums.C"].numpy(), sums["sums.b"].numpy())
    np.testing.assert_allclose(W, pooled.coef_, atol=1e-8)
    np.testing.assert_allclose(b, pooled.intercept_, atol=1e-8)


class Heard(fedfm.Progress):
    def __init__(self):
        self.lines = []

    def notice(self, text):
        self.lines.append(text)


def test_rows_that_would_count_twice_are_reported(tmp_path):
    classes = np.array(list("0123"))
    for name, part in {"a": slice(0, 50), "b": slice(40, 60), "c": slice(60, 90)}.items():
        np.savez(tmp_path / f"{name}.npz", x=X[part], y=Y[part], split=np.full(len(Y[part]), "train"), classes=classes)
    data = {"clients": {"a": str(tmp_path / "a.npz")}, "test_fraction": 0.0}
    fedfm.run(tables(tmp_path) | {"data": data}, tmp_path / "run")
    said = {}
    for name, file in (("b", "b"), ("c", "c"), ("again", "c")):
        heard = Heard()
        fedfm.join(tmp_path / "run", tmp_path / f"{file}.npz", name, progress=heard)
        said[name] = [text for text in heard.lines if "count twice" in text]
    assert said == {
        "b": ["10 of 20 training rows are also training rows of a: they count twice in the sums"],
        "c": [],
        "again": ["30 of 30 training rows are also training rows of c: they count twice in the sums"],
    }
    heard = Heard()
    for name in ("a", "b"):
        (tmp_path / f"{name}.npz").unlink()
    fedfm.join(tmp_path / "run", tmp_path / "c.npz", "late", progress=heard)
    assert len([text for text in heard.lines if "count twice, unseen" in text]) == 2


def test_a_newcomers_numbers_are_scaled_as_those_of_the_run(tmp_path):
    """The scale of the targets is that of the first silo, and the predictions are those of all rows."""
    for name, part in {"a": slice(0, 50), "b": slice(50, 90)}.items():
        np.savez(
            tmp_path / f"{name}.npz", x=X[part], y=NUMBERS[part] ** 2, split=np.full(part.stop - part.start, "train")
        )
    files = {name: str(tmp_path / f"{name}.npz") for name in "ab"}
    base = tables(tmp_path, "regression")
    fedfm.run(base | {"data": {"clients": {"a": files["a"]}}}, tmp_path / "run")
    fedfm.run(base | {"data": {"clients": files}}, tmp_path / "all")
    fedfm.join(tmp_path / "run", files["b"], "b")
    joined, whole = (
        fedfm.predict(path, files["a"], client=client)["values"]
        for path, client in ((tmp_path / "run", "b"), (tmp_path / "all", None))
    )
    np.testing.assert_allclose(np.array(joined, float), np.array(whole, float), rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy": RECORD}, "no ledger would count"),
        ({"class_weights": "balanced"}, "run again with all"),
        ({"features": "random", "width": 8}, "not a head of the model"),
    ],
)
def test_newcomers_whose_sums_do_not_add_up_are_refused(place, tmp_path, changes, words):
    fedfm.run(tables(place, **changes), tmp_path)
    with pytest.raises(InputError, match=words):
        fedfm.join(tmp_path, place / "classification.npz")
