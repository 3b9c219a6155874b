"""The disclosure by task vectors: attacks against closed cases, and audits of runs with and without leaks."""

import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny_text
from fedfm.api import execute
from fedfm.audits import fedbip_view
from fedfm.audits.audit import choose, perform
from fedfm.audits.head_view import head_names
from fedfm.audits.inference import task_vector
from fedfm.audits.replay import open_finished
from fedfm.cli import main
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from models import tiny_models
from small import features

NAMES = {"labels", "shares", "membership", "membership_tpr", "neighbours", "colluders_shown", "colluders"}


# --- the attacks ------------------------------------------------------------------------------------------------------
def test_absent_classes_are_only_pushed_down():
    """One step of softmax regression from zero: the bias goes by eta (share - 1/C), whatever the features are."""
    y = np.array([0, 0, 0, 2])
    x = np.random.default_rng(0).normal(size=(4, 5))
    error = np.eye(4)[y] - 0.25
    bias, weight = 0.1 * error.mean(0), 0.1 * error.T @ x / 4
    assert task_vector.class_evidence(weight, bias).tolist() == pytest.approx([0.05, -0.025, 0.0, -0.025])
    shifted = 0.1 * error.T @ (x + 100) / 4  # without a bias a feature that is never far from its mean stands for it
    assert task_vector.class_evidence(shifted, None, np.full(5, 100.0)).argsort()[-2:].tolist() == [2, 0]
    with pytest.raises(ValueError, match="typical feature"):
        task_vector.class_evidence(weight, None)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_shares_are_solved_for(classes, seed):
    rng = np.random.default_rng(seed)
    true, q = rng.dirichlet(np.ones(classes)), rng.dirichlet(np.full(classes, 2.0), classes)
    bias = 0.3 * (true - true @ q)
    assert np.allclose(task_vector.class_shares(bias, 0.3, q), true, atol=1e-6)


def test_overlap():
    assert task_vector.overlap(np.array([1.0, 0.0]), np.array([0.25, 0.75])) == 0.25


def aggregates(tau, negative, temperature=0.3):
    """(p, changes) of FedBip, written out."""
    n = len(tau)
    g = np.empty((n, n))
    for i, k in itertools.product(range(n), repeat=2):
        cosine = tau[i] @ tau[k] / np.sqrt((tau[i] @ tau[i]) * (tau[k] @ tau[k]))
        g[i, k] = {"clip": max(cosine, 0), "raw": cosine, "softmax": np.exp((cosine - 1) / temperature)}[negative]
    p = g / g.sum(1, keepdims=True)
    return p, p @ tau


@pytest.mark.parametrize("negative", ["clip", "raw", "softmax"])
@pytest.mark.parametrize("clients", [2, 5])
def test_the_last_vector_is_computed_from_the_others(negative, clients):
    rng = np.random.default_rng(clients)
    tau = rng.normal(size=40) + rng.normal(size=(clients, 40))
    p, change = aggregates(tau, negative)
    exact = task_vector.solve_victim(change[0], tau[:-1], p[0, :-1], p[0, -1])
    assert np.allclose(exact, tau[-1], atol=1e-12)
    found = task_vector.vectors_without_weights(change[0], tau[:-1], 0, negative, 0.3)
    assert 1 <= len(found) <= 3
    assert min(np.abs(x - tau[-1]).max() for x in found) < 1e-10  # nobody told p


def test_a_victim_of_whom_the_client_takes_nothing_is_not_found():
    tau = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 1]])  # the last is orthogonal: weight 0
    _, change = aggregates(tau, "clip")
    found = task_vector.vectors_without_weights(change[0], tau[:-1], 0, "clip")
    assert all(abs(x @ tau[-1]) < 0.1 * np.linalg.norm(x) for x in found)


# --- reading rows -----------------------------------------------------------------------------------------------------
def head(d=6, classes=3):
    return load_model(
        ModelSpec(name="features"),
        classes=tuple("abc"[:classes]),
        kind="features",
        task="classification",
        seed=0,
        feature_dim=d,
    )


def test_losses_and_alignments_of_rows_are_those_of_softmax_regression():
    model, rng = head(), np.random.default_rng(1)
    x, y = rng.normal(size=(9, 6)).astype(np.float32), rng.integers(0, 3, 9)
    rows = Rows({"features": torch.from_numpy(x)}, labels=torch.from_numpy(y))
    w = model.params().map(lambda t: torch.linspace(-1, 1, len(t)))
    tau = model.params().map(lambda t: torch.cos(torch.arange(len(t)).float()))
    weight, bias = head_names(model)
    W, b = w[weight].double().numpy(), w[bias].double().numpy()
    z = x @ W.T + b
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    model.load(w)
    np.testing.assert_allclose(fedbip_view.row_losses(model, rows), -np.log(p[np.arange(9), y]), rtol=1e-5)
    error = np.eye(3)[y] - p  # minus the gradient by the logits
    T, t = tau[weight].double().numpy(), tau[bias].double().numpy()
    dot = (error[:, :, None] * x[:, None] * T).sum((1, 2)) + error @ t
    length = np.sqrt((error**2).sum(1) * ((x**2).sum(1) + 1) * ((T**2).sum() + (t**2).sum()))
    np.testing.assert_allclose(fedbip_view.alignments(model, rows, w, tau), dot / length, rtol=1e-4)


# --- runs -------------------------------------------------------------------------------------------------------------
def run(folder, out="run", data=None, **method):
    """A finished run of FedBip on feature vectors; by default two clients a domain."""
    rows = folder / "rows.npz"
    if not rows.exists():
        features(folder, n=480, d=16)
    partition = {"name": "by_column", "column": "domain", "clients": 6}
    local = {"learning_rate": 0.2, "epochs": 2, "batch_size": 8} | method.pop("local", {})
    tables = {
        "data": {"path": str(rows), "partition": partition, **(data or {})},
        "model": {"name": "features"},
        "method": {"name": "fedbip", "rounds": 3, "local": local, **method},
        "run": {"seed": 3, "workers": 1},
    }
    execute.run(tables, folder / out)
    return folder / out


def tasks(folder, noise, groups=3, n=900, d=24, seed=0):
    """Rows of several domains, in each of which the classes look different, with a share of labels that are noise."""
    rng = np.random.default_rng(seed)
    y, domain = rng.integers(0, 4, n), rng.integers(0, groups, n)
    centres = 1.5 * rng.normal(size=(groups, 4, d))
    x = centres[domain, y] + rng.normal(size=(n, d))
    np.savez(
        folder / "rows.npz",
        x=x.astype(np.float32),
        y=np.where(rng.random(n) < noise, rng.integers(0, 4, n), y),
        split=np.where(np.arange(n) % 2 == 0, "test", "train"),
        domain=np.array(["north", "south", "west"])[domain],
    )


def by_name(found):
    return {f.name.removeprefix("task_vector."): f for f in found}


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaky")
    tasks(folder, noise=0.5)
    data = {"partition": {"name": "by_column", "column": "domain", "clients": 12}}
    path = run(folder, data=data, rounds=6, local={"epochs": 5})
    return path, by_name(perform(path, ["task_vector"]))


def test_a_run_that_leaks(leaky):
    path, found = leaky
    assert set(found) == NAMES
    assert found["membership"].verdict == "leaks"  # labels that are noise are learnt by heart
    assert found["membership"].low > 0.6
    assert found["membership_tpr"].estimate > 0.02  # 0.01 is guessing
    for name in ("colluders_shown", "colluders"):
        assert found[name].verdict == "leaks"
        assert found[name].detail["relative_error"] == pytest.approx([0] * 8, abs=1e-3)
        assert found[name].low > 0.999
    assert found["labels"].verdict == "inconclusive"  # everybody has every class
    assert not any(f.contradicts for f in found.values())
    result = json.loads((path / "audit.json").read_text())
    assert {f["name"] for f in result["findings"]} == {f"task_vector.{n}" for n in NAMES}


def test_the_command_line_and_the_report(leaky, capsys):
    path, _ = leaky
    assert main(["audit", str(path), "--attack", "task_vector", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["findings"]
    assert {f["name"] for f in told} == {f"task_vector.{n}" for n in NAMES}
    page = (path / "report.html").read_text()
    assert "Can the server tell from a client&#x27;s task vectors which rows it trained on?" in page


def test_similar_clients_are_found(tmp_path):
    tasks(tmp_path, noise=0)
    data = {"partition": {"name": "by_column", "column": "domain", "clients": 12}}
    found = by_name(perform(run(tmp_path, data=data), ["task_vector"]))["neighbours"]
    assert found.verdict == "leaks"
    assert found.estimate == 1
    assert found.bound == pytest.approx(3 / 11)  # three others of its domain among eleven
    assert found.detail["of"] == '"domain"'


def test_the_classes_of_a_client_are_found(tmp_path):
    data = {"partition": {"name": "by_class", "classes_per_client": 2, "clients": 8}}
    found = by_name(perform(run(tmp_path, data=data), ["task_vector"]))
    assert found["labels"].verdict == "leaks"
    assert found["labels"].estimate > 0.95
    assert found["shares"].verdict == "leaks"
    assert found["shares"].estimate > 0.75
    assert found["shares"].bound == pytest.approx(0.5, abs=0.1)
    assert found["neighbours"].detail["of"] == "largest class"


def test_nothing_planted_nothing_found(tmp_path):
    """Few passes over many equal rows dealt at random: no row stands out, no client resembles another."""
    features(tmp_path, n=4000, d=8)
    rows = dict(np.load(tmp_path / "rows.npz"))
    np.savez(tmp_path / "rows.npz", **rows | {"domain": np.random.default_rng(1).permutation(rows["domain"])})
    path = run(tmp_path, local={"epochs": 1, "learning_rate": 0.02}, rounds=2)
    found = by_name(perform(path, ["task_vector"]))
    assert found["membership"].verdict != "leaks"
    assert found["membership"].estimate == pytest.approx(0.5, abs=0.05)
    assert found["membership_tpr"].verdict != "leaks"
    assert found["neighbours"].verdict != "leaks"
    assert found["labels"].estimate is None
    assert found["shares"].verdict != "leaks"


def test_two_clients_know_each_other(tmp_path):
    data = {"partition": {"name": "iid", "clients": 2}}
    found = by_name(perform(run(tmp_path, data=data), ["task_vector"]))
    assert found["colluders_shown"].detail["relative_error"] == pytest.approx([0, 0], abs=1e-4)
    one = found["colluders"]  # nobody to ask: the worse of the solutions is what is told
    assert one.detail["solutions"] >= 1
    if one.detail["solutions"] > 1:
        assert "solutions, one of which is the vector" in one.says


@pytest.mark.sample("method0-True", "method2-False", "method6-True")
@pytest.mark.parametrize(
    ("method", "solved"),
    [
        ({"granularity": "module", "negative": "softmax"}, True),
        ({"negative": "raw"}, True),
        ({"similarity": "l2"}, False),
        ({"aggregate": "parameters"}, False),
        ({"fraction": 0.5}, False),
        ({"local": {"name": "adam", "learning_rate": 0.01}}, True),
        ({"local": {"name": "ditto", "lambda": 0.1}}, True),
    ],
)
def test_other_forms_of_the_method_are_read(tmp_path, method, solved):
    found = by_name(perform(run(tmp_path, **method), ["task_vector"]))
    assert set(found) == NAMES
    assert found["membership"].estimate is not None
    assert (found["colluders"].estimate is not None) is solved
    if solved:
        assert found["colluders"].estimate > 0.999


@pytest.mark.sample("fedawa")
@pytest.mark.parametrize("name", ["fedamp", "fedawa"])
def test_other_methods_whose_server_sees_each_vector_give_the_same_away(tmp_path, name):
    """Labels that are noise are learnt by heart, and a class that a client lacks is only pushed down: whoever mixes."""
    tasks(tmp_path, noise=0.5)
    data = {"partition": {"name": "by_column", "column": "domain", "clients": 12}}
    found = by_name(perform(run(tmp_path, "rows", data, name=name, rounds=6, local={"epochs": 5}), ["task_vector"]))
    assert set(found) == NAMES
    assert found["membership"].verdict == "leaks"
    assert found["membership"].low > 0.6
    for missing in ("colluders", "colluders_shown"):
        assert found[missing].estimate is None
        assert "FedBip's sums" in found[missing].says
    (tmp_path / "rows.npz").unlink()
    data = {"partition": {"name": "by_class", "classes_per_client": 2, "clients": 8}}
    found = by_name(perform(run(tmp_path, "classes", data, name=name), ["task_vector"]))
    assert found["labels"].verdict == "leaks"
    assert found["labels"].estimate > 0.95
    if name == "fedamp":
        assert found["neighbours"].estimate is not None
    else:
        assert "no map" in found["neighbours"].says


def test_a_client_that_sends_the_vector_of_another_client_is_replayed(tmp_path):
    """The method leaves it out of the sums, and has heard it all the same."""
    rng = np.random.default_rng(0)
    same, other = rng.normal(size=(2, 3, 4)).astype(np.float32)
    split, y = np.array(["train", "test", "test"]), np.array([0, 0, 1])
    for name, x in (("a", same), ("b", same), ("c", other)):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, split=split, classes=np.array(["u", "v"]))
    files = {n: str(tmp_path / f"{n}.npz") for n in "abc"}
    tables = {"data": {"clients": files}, "model": {"name": "features"}, "run": {"workers": 1}}
    local = {"batch_size": 64, "learning_rate": 0.1}
    tables["method"] = {"name": "fedbip", "rounds": 2, "local": local}
    result = execute.run(tables, tmp_path / "run")
    assert {(e["client"], e["code"]) for e in result["excluded"]} == {("b", "E_DUPLICATE")}
    assert set(by_name(perform(tmp_path / "run", ["task_vector"]))) == NAMES  # raises where the replay ends elsewhere


@pytest.mark.proof
@pytest.mark.parametrize("keys", [{"transport": "bfloat16"}, {"space": "product", "ranks": [1, 2, 4]}])
def test_vectors_of_another_dtype_or_rank_are_read(tmp_path, keys):
    tables = tiny_text.tables(tiny_text.save_all(tmp_path), "fedbip", local={"name": "sgd"}, **keys)
    execute.run(tables, tmp_path / "run")
    found = by_name(perform(tmp_path / "run", ["task_vector"]))
    assert set(found) == NAMES
    assert found["membership"].detail["clients"] == 3
    assert found["shares"].detail["clients"] == 3  # of each the first vector, whatever its rank
    assert (found["colluders"].estimate is None) is ("space" in keys)


def test_an_adapter_of_a_smaller_rank_is_measured_at_its_own_scale(tmp_path):
    table = tiny_models.prose(6)
    tiny_models.save("llama", tmp_path / "model")
    wide, narrow = (
        tiny_models.load(
            tmp_path / "model", table, AdaptationSpec("lora", rank=rank, alpha=6.0), task="language_modelling"
        )
        for rank in (3, 1)
    )
    rng = torch.Generator().manual_seed(0)
    start, tau = (Params({n: torch.randn(t.shape, generator=rng) for n, t in narrow.params().items()}) for _ in "ab")
    rows = narrow.prepare(table, range(6))
    expected = fedbip_view.alignments(narrow, rows, start, tau)
    with fedbip_view.at_rank(wide, start, tau) as both:
        np.testing.assert_allclose(
            fedbip_view.alignments(wide, wide.prepare(table, range(6)), *both), expected, atol=1e-6
        )


def test_a_run_without_rounds_is_refused(tmp_path):
    path = run(tmp_path, rounds=0)
    with pytest.raises(
        InputError, match=r"no audit fits this run: .*the run has no rounds, so no task vector was sent"
    ):
        choose(open_finished(path))


def test_a_language_model_has_rows_and_neighbours_but_no_classes(tmp_path):
    tiny_models.save("llama", tmp_path / "model")
    rng = np.random.default_rng(0)
    words = {"law": "the court held that appeal", "sea": "a ship sails over waves"}
    lines = [" ".join(rng.choice(words[k].split(), 6)) for k in ("law", "sea") for _ in range(24)]
    rows = [
        {"text": t, "court": "law" if i < 24 else "sea", "split": "test" if i % 3 == 0 else "train"}
        for i, t in enumerate(lines)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tables = {
        "data": {
            "path": str(tmp_path / "rows.jsonl"),
            "partition": {"name": "by_column", "column": "court", "clients": 4},
        },
        "model": {
            "name": str(tmp_path / "model"),
            "task": "language_modelling",
            "adaptation": {"name": "lora", "rank": 2},
        },
        "method": {"name": "fedbip", "rounds": 2, "local": {"learning_rate": 0.5, "batch_size": 4}},
        "run": {"workers": 1},
    }
    execute.run(tables, tmp_path / "run")
    found = by_name(perform(tmp_path / "run", ["task_vector"]))
    assert "does not apply" in found["labels"].says
    assert "does not apply" in found["shares"].says
    assert found["membership"].detail["members"] == 8  # blocks of tokens
    assert 0 <= found["membership"].low <= found["membership"].estimate <= found["membership"].high <= 1
    assert found["neighbours"].detail["of"] == '"court"'
    assert found["colluders"].low > 0.999


def test_losses_of_texts_are_means_over_their_tokens(tmp_path):
    tiny_models.save("llama", tmp_path / "model")
    table = tiny_models.prose(6)
    model = tiny_models.load(tmp_path / "model", table, "lora", task="language_modelling")
    rows = model.prepare(table, range(6))
    alone = [float(model.loss(rows.batch([i])).detach()) for i in range(len(rows))]
    np.testing.assert_allclose(fedbip_view.row_losses(model, rows), alone, rtol=1e-5)
