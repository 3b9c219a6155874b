"""The last round's model of a run that keeps the best one."""

import json

import numpy as np
import pytest

import fedfm
import small
from fedfm.cli import main
from fedfm.runtime.progress import Progress


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs: of eight rounds at a rate that is too large, and of as many as that one's best without patience."""
    folder = tmp_path_factory.mktemp("last")
    tables = small.experiment(folder, method={"rounds": 8, "local": {"learning_rate": 3.0, "epochs": 4}})
    tables["data"]["val_fraction"] = 0.3
    tables["run"] = {**tables.get("run", {}), "patience": 3}
    result = fedfm.run(tables, folder / "run", progress=Progress())
    (folder / "result.json").write_text(json.dumps(result))
    del tables["run"]["patience"]
    tables["method"]["rounds"] = result["rounds"]
    fedfm.run(tables, folder / "straight", progress=Progress())
    return folder


def test_both_models_are_there(folder):
    result = json.loads((folder / "result.json").read_text())
    assert result["details"]["model_of_round"] < result["rounds"]
    best, last, straight = (
        fedfm.predict(folder / run, folder / "rows.npz", last=last)["probabilities"]
        for run, last in (("run", False), ("run", True), ("straight", False))
    )
    assert np.array_equal(last, straight)
    assert not np.array_equal(best, last)
    assert np.array_equal(straight, fedfm.predict(folder / "straight", folder / "rows.npz", last=True)["probabilities"])


def test_the_command_exports_it(folder, capsys):
    for name, flags in (("best", []), ("last", ["--last"])):
        assert main(["export", str(folder / "run"), "--to", "torch", "--out", str(folder / name), *flags]) == 0
    assert main(["export", str(folder / "straight"), "--to", "torch", "--out", str(folder / "s")]) == 0
    best, last, straight = ((folder / name / "model.safetensors").read_bytes() for name in ("best", "last", "s"))
    assert last == straight != best
    (folder / "run/last").rename(folder / "gone")
    assert main(["predict", str(folder / "run"), str(folder / "rows.npz"), "--last"]) == 2
    assert "has only the model of round" in capsys.readouterr().err
