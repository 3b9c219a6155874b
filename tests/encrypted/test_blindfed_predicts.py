"""Predictions of a finished BlindFed run where the rows are: in the clear here, and at a silo behind a SuperLink."""

import json

import numpy as np
import pytest

import ciphertext_student
import fedfm
from fedfm.api.predict import predict
from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import PREDICTIONS
from fedfm.errors import InputError
from fedfm.runtime import own_rows
from fedfm.runtime.client_memory import Store
from fedfm.sites import silo_config
from small import pictures


def experiment(folder, **method):
    local = {"learning_rate": 0.2, "epochs": 5, "batch_size": 16}
    keys = {"name": "blindfed", "foundation": str(folder / "tiny-student"), "rounds": 3, "released": "grid"}
    return {
        "data": {"path": str(folder / "pictures.npz"), "partition": {"name": "iid", "clients": 2}},
        "method": keys | {"local": local} | method,
        "run": {"seed": 0, "workers": 1},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("predicts")
    pictures(root, 60)
    ciphertext_student.folder(root)
    rows = np.load(root / "pictures.npz")
    np.savez(root / "new.npz", x=rows["x"][:6])  # without labels
    fedfm.run(experiment(root, encryption="clear"), root / "run")
    return root


def test_clients_predict_what_the_server_would(folder, tmp_path):
    more = {"encryption": "clear", "rounds": 0, "predict": True, "trained": str(folder / "run")}
    result = fedfm.run(experiment(folder, **more), tmp_path / "run")
    assert result["accuracy"] is not None  # in the clear the server judges, on its own rows
    assert result["client_accuracy"] == {"client-00": None, "client-01": None}  # nobody is asked for scores
    whole = predict(folder / "run", folder / "pictures.npz")
    rows, at = np.load(folder / "pictures.npz"), 0
    for client in ("client-00", "client-01"):
        lines = Store(tmp_path / "run" / "private" / "memory", client)[PREDICTIONS].decode().splitlines()
        assert lines
        at += len(lines)
        for line in map(json.loads, lines):
            closest = np.abs(np.array(whole["probabilities"]) - line["probabilities"]).max(1).argmin()
            np.testing.assert_allclose(whole["probabilities"][closest], line["probabilities"], atol=2e-5)
            assert whole["predictions"][closest] == line["prediction"]
    assert at == result["details"]["predicted"] == (rows["split"] == "test").sum()
    assert result["params_sha256"] == fedfm.load_run(folder / "run").manifest["result"]["params_sha256"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rounds": 1}, "does not train"),
        ({"trained": ""}, "does not train"),
        ({"trained": "nowhere"}, "finished run"),
        ({"released": "class"}, "its released is 'grid'"),
    ],
)
def test_runs_that_cannot_predict_are_refused(change, reason, folder, tmp_path):
    more = {"encryption": "clear", "rounds": 0, "predict": True, "trained": str(folder / "run")}
    with pytest.raises(InputError, match=reason):
        fedfm.run(experiment(folder, **more | change), tmp_path / "run")


def test_a_silo_names_the_rows_and_its_file_stays_the_law(folder, tmp_path):
    made = Experiment.from_dict(experiment(folder, rounds=0, predict=True, trained=str(folder / "run")))
    told = made.for_clients()
    assert str(folder / "run") not in told.to_toml()  # a site is not told whose run it is
    lines = ['name = "h"', f"data = {json.dumps(str(folder / 'pictures.npz'))}"]
    (tmp_path / "silo.toml").write_text("\n".join(lines))
    with pytest.raises(InputError, match="set predict to a file"):
        own_rows.populate(silo_config.load(tmp_path / "silo.toml").rows, told, ["ant", "bee", "cow", "dog"])
    lines.append(f"predict = {json.dumps(str(folder / 'new.npz'))}")
    (tmp_path / "silo.toml").write_text("\n".join(lines))
    found = own_rows.populate(silo_config.load(tmp_path / "silo.toml").rows, told, ["ant", "bee", "cow", "dog"]).data(
        "h"
    )
    assert (len(found.train), len(found.val), len(found.test)) == (0, 0, 6)
    assert found.test.labels is None


def test_a_row_that_left_the_intervals_has_no_prediction(folder, tmp_path, capsys):
    x = np.load(folder / "new.npz")["x"].copy()
    x[2] = np.random.default_rng(0).integers(0, 2, x[2].shape) * 255
    np.savez(tmp_path / "some.npz", x=x)
    clean, found = predict(folder / "run", folder / "new.npz"), predict(folder / "run", tmp_path / "some.npz")
    assert [i for i, label in enumerate(found["predictions"]) if label is None] == [2]
    assert found["probabilities"][2] is None
    assert None not in clean["predictions"]
    for i in (0, 1, 3, 4, 5):
        np.testing.assert_allclose(found["probabilities"][i], clean["probabilities"][i], atol=1e-5)
    assert "1 of 6 rows have no prediction" in found["warnings"][-1]
    assert found["warnings"][-1].endswith(": row 2")
    command = ["predict", str(folder / "run"), str(tmp_path / "some.npz")]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[2] == "-"
    assert "1 of 6 rows have no prediction" in said.err
    assert main([*command, "--out", str(tmp_path / "out.csv")]) == 0
    assert (tmp_path / "out.csv").read_text().splitlines()[3] == "2,,"


def test_a_client_writes_no_prediction_for_such_a_row(folder, tmp_path):
    rows = dict(np.load(folder / "pictures.npz"))
    rows["x"] = rows["x"].copy()
    lost = np.flatnonzero(rows["split"] == "test")[0]
    rows["x"][lost] = np.random.default_rng(0).integers(0, 2, rows["x"][lost].shape) * 255
    np.savez(tmp_path / "pictures.npz", **rows)
    asked = experiment(folder, encryption="clear", predict=True, trained=str(folder / "run")) | {
        "data": {"path": str(tmp_path / "pictures.npz"), "partition": {"name": "iid", "clients": 2}}
    }
    asked["method"]["rounds"] = 0
    result = fedfm.run(asked, tmp_path / "run")
    stores = [Store(tmp_path / "run" / "private" / "memory", f"client-0{i}") for i in range(2)]
    lines = [json.loads(line) for store in stores for line in store[PREDICTIONS].decode().splitlines()]
    assert result["details"]["predicted"] == len(lines) == (rows["split"] == "test").sum()
    assert [line["probabilities"] for line in lines if line["prediction"] is None] == [None]


def test_the_command_says_which_runs_predict_at_silos(folder, capsys):
    assert main(["predict", str(folder / "run"), str(folder / "new.npz"), "--engine", "deployment"]) == 2
    assert 'encryption = "ckks"' in capsys.readouterr().err


@pytest.mark.release
def test_a_silo_behind_a_superlink_predicts_the_same(folder, tmp_path, capsys):
    pytest.importorskip("tenseal", reason="the extra [encrypted] is not installed")
    fedfm.run(experiment(folder, encryption="ckks", link="slow"), tmp_path / "run")
    here = predict(tmp_path / "run", folder / "new.npz")
    arguments = ["predict", str(tmp_path / "run"), str(folder / "new.npz"), "--engine", "deployment"]
    assert main([*arguments, "--format", "json"]) == 0
    there = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert there["predictions"] == here["predictions"]
    assert there["classes"] == here["classes"]
    np.testing.assert_allclose(there["probabilities"], here["probabilities"], atol=0.02)


def test_a_silo_reads_its_predictions(folder, tmp_path, capsys):
    (tmp_path / "silo.toml").write_text(f'name = "h"\ndata = {json.dumps(str(folder / "pictures.npz"))}\n')
    assert main(["silo", "predictions", str(tmp_path / "silo.toml")]) == 0
    assert "no run has left predictions" in capsys.readouterr().out
    store = Store(tmp_path / ".fedfm" / "runs" / "study-1" / "silo" / "memory", "h")
    store[PREDICTIONS] = b'{"file": "a.png", "prediction": "ant", "probabilities": [0.75, 0.25]}'
    assert main(["silo", "predictions", str(tmp_path / "silo.toml")]) == 0
    assert capsys.readouterr().out.splitlines() == ["study-1: 1 rows", "a.png\tant\t0.750"]
    store[PREDICTIONS] += b'\n{"file": "b.png", "prediction": null, "probabilities": null}'
    assert main(["silo", "predictions", str(tmp_path / "silo.toml")]) == 0
    assert capsys.readouterr().out.splitlines()[::2] == ["study-1: 2 rows, 1 without a prediction", "b.png\t-"]
