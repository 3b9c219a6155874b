"""BlindFed on texts that lie at silos: a run and predictions over a SuperLink, and rows without predictions."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedfm
from fedfm.api.predict import predict
from fedfm.cli import main
from fedfm.core.capabilities import PREDICTIONS
from fedfm.encrypted.protocol import text_rows
from fedfm.encrypted.student.distil import distil
from fedfm.errors import InputError
from fedfm.models.load import load_model
from fedfm.models.spec import AdaptationSpec, ModelSpec
from fedfm.runtime.client_memory import Store
from fedfm.runtime.own_rows import OwnRows, populate
from tiny_text import save_bert, texts

PLACES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("texts-at-silos")
    save_bert(root / "bert", num_hidden_layers=1, hidden_size=8, intermediate_size=12)
    texts(root / "hospital-a.jsonl")
    rows = [json.loads(line) for line in (root / "hospital-a.jsonl").read_text().splitlines()]
    (root / "new.jsonl").write_text("".join(json.dumps({"text": row["text"]}) + "\n" for row in rows[:6]))
    what = {
        "data": {"path": str(root / "hospital-a.jsonl")},
        "model": {"name": str(root / "bert"), "max_length": PLACES},
        "distil": {"direct": True, "epochs": [0, 0, 0]},
    }
    distil(what, root / "student")
    return root


def experiment(folder, student="student", run=None, **method):
    local = {"learning_rate": 0.3, "epochs": 5, "batch_size": 8}
    keys = {"name": "blindfed", "foundation": str(folder / student), "rounds": 1, "encryption": "clear"}
    return {
        "data": {"clients": {"hospital-a": str(folder / "hospital-a.jsonl")}},
        "method": keys | {"local": local} | method,
        "run": {"seed": 0, **(run or {})},
    }


@pytest.mark.release
@pytest.mark.deployment
def test_texts_at_a_silo_give_the_run_in_the_clear(folder, tmp_path):
    """The noise of a ciphertext is drawn by the system, so adapters agree but for it."""
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    clear = fedfm.run(experiment(folder), tmp_path / "clear")
    secret = {"encryption": "ckks", "link": "slow", "run": {"engine": "deployment"}}
    result = fedfm.run(experiment(folder, **secret), tmp_path / "run")
    assert result["accuracy"] == clear["accuracy"] > 0.6
    assert result["excluded"] == []
    assert result["details"]["encrypted_rows"] == 90
    here, there = (load_file(tmp_path / name / "adapter" / "model.safetensors") for name in ("clear", "run"))
    for name in here:
        torch.testing.assert_close(there[name], here[name], rtol=0, atol=1e-3)


def test_a_silo_reads_texts_to_predict(folder):
    asked = fedfm.Experiment.from_dict(experiment(folder, rounds=0, predict=True, trained="run", encryption="ckks"))
    rows = OwnRows("h", str(folder / "hospital-a.jsonl"), predict=str(folder / "new.jsonl"), columns={"text": "text"})
    found = populate(rows, asked.for_clients(), ["bird", "fish", "plant"]).data("h")
    assert (len(found.train), len(found.val), len(found.test)) == (0, 0, 6)
    assert found.test.labels is None


def test_a_text_that_left_the_intervals_has_no_prediction(folder, tmp_path):
    """The student's range is narrowed, so that some rows are beyond it, here and at the client."""
    shutil.copytree(folder / "student", tmp_path / "student")
    place = tmp_path / "student" / "config.json"
    lines = [json.loads(line) for line in (folder / "hospital-a.jsonl").read_text().splitlines()]
    spec = ModelSpec(str(folder / "student"), adaptation=AdaptationSpec("side_adapter"))
    model = load_model(spec, classes=("bird", "fish", "plant"), kind="text")
    ids = model.tools.tokenizer([line["text"] for line in lines], padding="max_length", max_length=PLACES)["input_ids"]
    states = model.states(text_rows.rows_of(torch.tensor(ids).masked_fill(torch.tensor(ids) == 0, -1)))
    config = json.loads(place.read_text())
    config["fedfm_polynomials"]["blocks"][0]["range"] = float(states.abs().amax((1, 2, 3)).quantile(0.8))
    place.write_text(json.dumps(config))
    asked = experiment(folder, foundation=str(tmp_path / "student"))
    fedfm.run(asked, tmp_path / "run")
    whole = predict(tmp_path / "run", folder / "hospital-a.jsonl")
    lost = [label is None for label in whole["predictions"]]
    assert 0 < sum(lost) < len(lost)
    assert f"{sum(lost)} of {len(lost)} rows have no prediction" in whole["warnings"][-1]
    more = {"rounds": 0, "predict": True, "trained": str(tmp_path / "run"), "foundation": str(tmp_path / "student")}
    result = fedfm.run(experiment(folder, **more), tmp_path / "asked")
    found = Store(tmp_path / "asked" / "private" / "memory", "hospital-a")[PREDICTIONS].decode().splitlines()
    assert result["details"]["predicted"] == len(found)
    want = [label for label, row in zip(whole["predictions"], lines, strict=True) if row["split"] == "test"]
    assert [json.loads(line)["prediction"] for line in found] == want
    assert None in want


def test_rows_of_another_kind_are_refused(folder, tmp_path):
    np.savez(tmp_path / "pictures.npz", x=np.zeros((3, 8, 8, 3), np.uint8))
    fedfm.run(experiment(folder), tmp_path / "run")
    with pytest.raises(InputError, match="takes texts"):
        predict(tmp_path / "run", tmp_path / "pictures.npz")


@pytest.mark.release
def test_a_silo_behind_a_superlink_predicts_the_same(folder, tmp_path, capsys):
    pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')
    fedfm.run(experiment(folder, encryption="ckks", link="slow"), tmp_path / "run")
    here = predict(tmp_path / "run", folder / "new.jsonl")
    arguments = ["predict", str(tmp_path / "run"), str(folder / "new.jsonl"), "--engine", "deployment"]
    assert main([*arguments, "--format", "json"]) == 0
    there = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert there["predictions"] == here["predictions"]
    np.testing.assert_allclose(there["probabilities"], here["probabilities"], atol=0.02)
