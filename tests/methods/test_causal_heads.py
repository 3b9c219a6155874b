"""One-shot methods on classifiers of causal language models, whose own heads have no bias."""

import json

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

import fedfm
import tiny_text
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError
from fedfm.methods._one_shot import need_head
from fedfm.methods.ccvr import CCVR
from fedfm.models.load import load_model
from fedfm.models.quiet import quiet
from fedfm.models.spec import AdaptationSpec, ModelSpec
from stopping import run_stopped, stop_in_steps

CLASSES = sorted(tiny_text.WORDS)
FITTED = {  # a bias is part of their result; FedKT learns little from so few rows by its defaults
    **{name: {} for name in ("fedpft", "fedncm", "average", "ensemble", "kd", "ccvr", "fedbe")},
    "fedkt": {"subsets": 1, "public": 1.0},
}
TRAINED = ("fedavg", "dsfl", "fedfed")  # they train the head as it is
L2 = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("causal")
    tiny_text.save_llama(path / "llama")
    tiny_text.save_gpt2(path / "gpt2")
    tiny_text.texts(path / "rows.jsonl", 300)
    return path


def experiment(folder, method, model="llama", clients=3, run=None, **keys):
    return {
        "data": {"path": str(folder / "rows.jsonl"), "partition": {"name": "iid", "clients": clients}},
        "model": {"name": str(folder / model), "adaptation": {"name": "head"}},
        "method": {"name": method, **keys},
        "run": {"seed": 1, "workers": 1, **(run or {})},
    }


def known(folder, model="llama"):
    """For each split, the features that transformers computes text by text, and the labels."""
    from transformers import AutoModel, AutoTokenizer

    with quiet():
        backbone, tokenizer = AutoModel.from_pretrained(folder / model), AutoTokenizer.from_pretrained(folder / model)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    with torch.no_grad():
        x = [backbone.eval()(**tokenizer(r["text"], return_tensors="pt")).last_hidden_state[0, -1] for r in rows]
    x, y = torch.stack(x).numpy(), np.array([CLASSES.index(r["label"]) for r in rows])
    test = np.array([r["split"] == "test" for r in rows])
    return {"train": (x[~test], y[~test]), "test": (x[test], y[test])}


def regression(x, y):
    """(scaler, the minimum of the mean cross-entropy plus L2/2 ||W||^2 on standardised features)."""
    scale = StandardScaler().fit(x)
    return scale, LogisticRegression(C=1 / (len(y) * L2), tol=1e-10, max_iter=5000).fit(scale.transform(x), y)


def predicted(run, folder):
    """Labels of the test rows."""
    test = [line for line in (folder / "rows.jsonl").read_text().splitlines() if '"test"' in line]
    (run / "test.jsonl").write_text("\n".join(test) + "\n")
    return [CLASSES.index(name) for name in fedfm.predict(run, run / "test.jsonl")["predictions"]]


@pytest.mark.sample("fedpft")
@pytest.mark.parametrize("method", FITTED)
def test_runs_predicts_and_repeats_with_workers(folder, tmp_path, method):
    result = fedfm.run(experiment(folder, method, **FITTED[method]), tmp_path / "run")
    assert result["accuracy"] > 0.45  # a guess is right on a third
    said, (_, y) = predicted(tmp_path / "run", folder), known(folder)["test"]
    assert np.mean(np.array(said) == y) == pytest.approx(result["accuracy"])
    again = fedfm.run(experiment(folder, method, run={"workers": 2}, **FITTED[method]), tmp_path / "again")
    for key in ("params_sha256", "bytes_up", "bytes_down", "client_accuracy"):
        assert again[key] == result[key], key


@pytest.mark.sample("llama")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_one_client_averaged_is_the_regression_of_scikit_learn(folder, tmp_path, model):
    result = fedfm.run(experiment(folder, "average", model, clients=1, head={"l2": L2}), tmp_path / "run")
    rows = known(folder, model)
    scale, theirs = regression(*rows["train"])
    x, y = rows["test"]
    assert predicted(tmp_path / "run", folder) == theirs.predict(scale.transform(x)).tolist()
    assert result["accuracy"] == pytest.approx(theirs.score(scale.transform(x), y))


@pytest.mark.sample("gpt2")
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_fedpft_is_as_accurate_as_the_regression_on_all_rows(folder, tmp_path, model):
    keys = {"components": 4, "head": {"l2": L2}}
    result = fedfm.run(experiment(folder, "fedpft", model, **keys), tmp_path / "run")
    rows = known(folder, model)
    scale, theirs = regression(*rows["train"])
    x, y = rows["test"]
    assert result["accuracy"] == pytest.approx(theirs.score(scale.transform(x), y), abs=0.1)


def test_fedncm_is_the_nearest_centroid_of_scikit_learn(folder, tmp_path):
    fedfm.run(experiment(folder, "fedncm"), tmp_path / "run")
    rows = known(folder)
    theirs = NearestCentroid().fit(*rows["train"])
    assert predicted(tmp_path / "run", folder) == theirs.predict(rows["test"][0]).tolist()


def test_a_head_without_a_bias_is_refused_where_one_is_fitted(folder):
    spec = ModelSpec(str(folder / "llama"), adaptation=AdaptationSpec("head"))
    plain, given = (load_model(spec, classes=CLASSES, kind="text", head_bias=bias) for bias in (False, True))
    need_head(plain, bias=False)
    need_head(given)
    with pytest.raises(InputError, match="fits a linear head with a bias, and this head has none"):
        need_head(plain)
    lora = load_model(ModelSpec(str(folder / "llama"), adaptation=AdaptationSpec()), classes=CLASSES, kind="text")
    with pytest.raises(InputError, match="trains a linear head on frozen features"):
        need_head(lora, bias=False)


def test_a_class_that_nobody_has_is_never_predicted(folder, tmp_path):
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(x for x in lines if '"test"' in x or '"fish"' not in x) + "\n")
    tables = experiment(folder, "fedpft")
    tables["data"]["path"] = str(tmp_path / "rows.jsonl")
    fedfm.run(tables, tmp_path / "run")
    assert {CLASSES.index("bird"), CLASSES.index("plant")} == set(predicted(tmp_path / "run", folder))


@pytest.mark.sample("fedavg")
@pytest.mark.parametrize("method", TRAINED)
def test_methods_that_train_keep_the_heads_form(folder, tmp_path, method):
    from transformers import AutoModelForSequenceClassification

    fedfm.run(experiment(folder, method, rounds=2), tmp_path / "run")
    names = json.loads((tmp_path / "run" / "adapter" / "fedfm.json").read_text())["names"]
    assert names == ["score.weight"]
    fedfm.export(tmp_path / "run", "hf", tmp_path / "out")
    with quiet():
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
        x = torch.from_numpy(known(folder)["test"][0])
    with torch.no_grad():
        assert theirs.score(x).argmax(1).tolist() == predicted(tmp_path / "run", folder)


def test_check_audit_report_and_export_of_a_run(folder, tmp_path, capsys):
    tables = experiment(folder, "fedpft")
    (tmp_path / "exp.toml").write_text(Experiment.from_dict(tables).to_toml())
    assert main(["check", str(tmp_path / "exp.toml"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainable"] == 16 * 3 + 3
    fedfm.run(tables, tmp_path / "run")
    with pytest.raises(InputError, match="the run gave the head a bias"):
        fedfm.export(tmp_path / "run", "hf", tmp_path / "hf")
    fedfm.export(tmp_path / "run", "torch", tmp_path / "torch")
    assert "`score.bias`, and LlamaForSequenceClassification has none" in (tmp_path / "torch/README.md").read_text()
    assert fedfm.audit(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0


def test_cosine_centroids_have_no_bias_and_export_to_transformers(folder, tmp_path):
    from transformers import AutoModelForSequenceClassification

    fedfm.run(experiment(folder, "fedncm", distance="cosine"), tmp_path / "run")
    fedfm.export(tmp_path / "run", "hf", tmp_path / "out")
    with quiet():
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        said = theirs.score(torch.from_numpy(known(folder)["test"][0])).argmax(1).tolist()
    assert said == predicted(tmp_path / "run", folder)


def test_ccvr_resumes_and_says_which_adaptation_has_a_bias(folder, tmp_path, monkeypatch):
    tables = experiment(folder, "ccvr", rounds=2)
    straight = fedfm.run(tables, tmp_path / "straight")
    stop_in_steps(monkeypatch, CCVR, [2])
    run_stopped(tables, tmp_path / "broken")
    assert fedfm.resume(tmp_path / "broken")["params_sha256"] == straight["params_sha256"]
    tables["model"]["adaptation"] = {"name": "lora"}
    with pytest.raises(InputError, match="gives one"):
        fedfm.run(tables, tmp_path / "lora")
