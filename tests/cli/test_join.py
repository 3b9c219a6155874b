"""A client that comes after training."""

import json

import numpy as np
import pytest
import torch

import fedfm
import tiny_text
from central import call
from fedfm.api.join import join
from fedfm.api.predict import load
from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.linalg.params import Params
from fedfm.models.adapters import lora
from fedfm.runtime.run_directory import Run
from small import experiment, features


def finished(folder, **method):
    path = folder / "exp.toml"
    path.write_text(to_toml(experiment(folder, method={"rounds": 2, **method})))
    assert main(["run", str(path), "--out", str(folder / "run"), "--format", "json"]) == 0
    return folder / "run"


def one_shot(folder):
    tables = experiment(folder)
    tables["method"] = {"name": "average"}
    return fedfm.run(tables, folder / "one-shot")["run"]


@pytest.fixture(scope="module")
def bip(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("bip"), name="fedbip")


def test_a_newcomer_gets_a_model_that_predicts_and_exports(bip, tmp_path, capsys):
    rows = features(tmp_path, seed=3)
    code, out, _ = call(capsys, "join", bip, rows, "--format", "json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert result["client"] == "newcomer"
    assert 0 <= result["accuracy"] <= 1
    assert sum(result["weights"].values()) == pytest.approx(1)
    assert set(result["weights"]) == {"newcomer", *Run.open(bip).manifest["clients"]}
    assert call(capsys, "predict", bip, rows, "--client", "newcomer")[0] == 0
    assert call(capsys, "export", bip, "--to", "torch", "--client", "newcomer", "--out", tmp_path / "out")[0] == 0
    assert join(bip, rows)["client"] == "newcomer-2"


def test_the_same_newcomer_gets_the_same_bits(bip, tmp_path):
    from fedfm.api.predict import load

    rows = features(tmp_path, seed=3)
    names = [join(bip, rows, name)["client"] for name in ("east", "west")]
    # A stream of its own by name: the two differ in the order of their rows, and in nothing else.
    assert names == ["east", "west"]
    east = load(bip, "east")[2]
    run = Run.open(bip)
    manifest = json.loads(json.dumps(run.manifest))
    del run.manifest["newcomers"]["east"]
    run.write_manifest()
    join(bip, rows, "east")
    again = load(bip, "east")[2]
    assert isinstance(east, Params)
    assert east.sha256() == again.sha256()
    assert Run.open(bip).manifest["newcomers"]["east"] == manifest["newcomers"]["east"]


def test_with_one_model_for_all_a_newcomer_adapts_it(tmp_path, capsys):
    run = finished(tmp_path, name="fedavg")
    code, out, _ = call(capsys, "join", run, features(tmp_path, seed=3), "--client", "north", "--format", "json")
    result = json.loads(out.strip().splitlines()[-1])
    assert code == 0
    assert result["weights"] == {}
    assert call(capsys, "predict", run, features(tmp_path), "--client", "north")[0] == 0


@pytest.mark.parametrize("name", ["flora", "fedex_lora"])
def test_merged_weights_stay_while_a_newcomer_adapts_the_model(name, tmp_path):
    tables = tiny_text.tables(tiny_text.save_all(tmp_path), name, lora={"rank": 2})
    fedfm.run(tables, tmp_path / "run")
    _, _, w = load(tmp_path / "run")
    merged = lora.factors(w, 4.0)
    assert lora.rank_of(w) > 2
    assert join(tmp_path / "run", tmp_path / "rows.jsonl", "north")["accuracy"] is not None
    _, _, adapted = load(tmp_path / "run", "north")
    for path, (u, v) in lora.factors(adapted, 4.0).items():
        p, q = merged[path]
        assert 1 <= torch.linalg.matrix_rank(u @ v - p @ q, atol=1e-5) <= 2  # an adapter of the run's rank beside it


def test_impossible_joins_are_refused(bip, tmp_path, capsys):
    wider = tmp_path / "wide.npz"
    np.savez(wider, x=np.zeros((30, 9), np.float32), y=np.arange(30) % 4, classes=["ant", "bee", "cow", "dog"])
    for args, says in (
        ((bip, tmp_path / "absent.csv"), "no such file"),
        ((bip, wider), "the rows are of another kind"),
        ((bip, features(tmp_path), "--client", Run.open(bip).manifest["clients"][0]), "has a client of that name"),
        ((finished(tmp_path, name="local"), features(tmp_path)), "no start weights for a client"),
        ((one_shot(tmp_path), features(tmp_path)), "no start weights for a client"),
    ):
        code, _, err = call(capsys, "join", *args)
        assert code == 2
        assert says in err


def test_notices_on_a_newcomers_rows_are_printed(tmp_path, capsys):
    tables = experiment(tmp_path)
    tables["method"] = {"name": "analytic"}
    run = fedfm.run(tables, tmp_path / "sums")["run"]
    rows = np.load(features(tmp_path))
    x = rows["x"][:40].copy()
    x[:5, 0] = -999.0
    np.savez(tmp_path / "marks.npz", x=x, y=rows["y"][:40], classes=rows["classes"])
    code, _, err = call(capsys, "join", run, tmp_path / "marks.npz", "--client", "marks")
    assert code == 0
    assert "column x[:, 0] is -999 in 5 of 40 rows" in err
    np.savez(tmp_path / "one.npz", x=rows["x"][:1], y=rows["y"][:1], classes=rows["classes"])
    code, out, err = call(capsys, "join", run, tmp_path / "one.npz", "--client", "one")
    assert code == 0
    assert "no row is left for tests" in err
    assert "its model                   -" in out


@pytest.mark.parametrize("method", [{"name": "fedncm"}, {"name": "ghofl"}], ids=["fedncm", "lda"])
def test_a_newcomers_sums_give_the_head_of_a_run_with_all(tmp_path, method):
    files = {}
    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        files[name] = str(features(tmp_path / name, seed=number))
    tables = {"model": {"name": "features"}, "method": method, "run": {"workers": 1}}
    fedfm.run(tables | {"data": {"clients": {"a": files["a"]}}}, tmp_path / "run")
    fedfm.run(tables | {"data": {"clients": files}}, tmp_path / "all")
    assert join(tmp_path / "run", files["b"], "b")["how"] == "sums"
    joined, whole = load(tmp_path / "run", "b")[2], load(tmp_path / "all")[2]
    for name, tensor in whole.items():
        assert torch.allclose(joined[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_median_of_sums_is_no_sum(tmp_path, capsys):
    tables = experiment(tmp_path) | {"method": {"name": "fedncm"}, "aggregation": {"name": "median"}}
    run = fedfm.run(tables, tmp_path / "run")["run"]
    code, _, err = call(capsys, "join", run, features(tmp_path))
    assert code == 2
    assert "the [aggregation] is not the plain sum" in err


def test_a_quadratic_head_is_no_model_for_a_newcomer(tmp_path, capsys):
    tables = experiment(tmp_path)
    tables["method"] = {"name": "ghofl", "form": "nb"}
    run = fedfm.run(tables, tmp_path / "run")["run"]
    code, _, err = call(capsys, "join", run, features(tmp_path))
    assert code == 2
    assert "the result of ghofl is not a head of the model" in err
