"""The public names of `import fedfm`, and a Python function for every command."""

import json
import subprocess
import sys

import numpy as np
import pytest

import fedfm
from fedfm.errors import InputError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs, and rows to predict."""
    folder = tmp_path_factory.mktemp("runs")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(folder / "rows.npz", x=x, y=(x[:, 0] > 0).astype(int))
    for name in ("fedavg", "fedprox"):
        tables = {
            "data": {"path": str(folder / "rows.npz"), "partition": {"name": "iid", "clients": 2}},
            "model": {"name": "features"},
            "method": {"name": name, "rounds": 1},
            "run": {"workers": 1},
        }
        fedfm.run(tables, folder / name)
    return folder


def test_dir_lists_exactly_the_public_names():
    assert {
        "predict",
        "export",
        "compare",
        "audit",
        "join",
        "leave",
        "worth",
        "advise",
        "report",
        "run",
        "resume",
    } <= set(dir(fedfm))
    assert dir(fedfm) == sorted(fedfm.__all__)
    for name in dir(fedfm):
        getattr(fedfm, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fedfm.nothing  # noqa: B018


def test_importing_fedfm_loads_no_heavy_library():
    code = "import sys, fedfm; dir(fedfm); print([m for m in ('torch', 'numpy', 'flwr') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_command_is_a_function(runs, tmp_path):
    path = runs / "fedavg"
    predicted = fedfm.predict(path, runs / "rows.npz")
    assert len(predicted["predictions"]) == 60
    assert fedfm.export(path, "torch", str(tmp_path / "out")) == str(tmp_path / "out")
    table = fedfm.compare(path, runs / "fedprox", out=tmp_path / "c.html")
    assert table.splitlines()[2].split()[:2] == ["fedavg", "fedavg"]
    assert (tmp_path / "c.html").exists()
    assert fedfm.compare([path, str(runs / "fedprox")]) == table
    assert [f.name for f in fedfm.audit(path, "head_rows", progress=fedfm.Progress())] == ["head_rows"]
    with pytest.raises(InputError, match='--attack nothing: expected "head_rows"'):
        fedfm.audit(path, "nothing")
    (path / "report.html").unlink()
    assert fedfm.report(path) == path / "report.html"
    assert (path / "report.html").exists()


def test_progress_and_notices_are_shown_by_default(runs, tmp_path, capsys):
    tables = json.loads((runs / "fedavg/manifest.json").read_text())["experiment"]
    fedfm.run(tables, tmp_path / "told")
    assert "round 1 of 1" in capsys.readouterr().err
    fedfm.run(tables, tmp_path / "silent", progress=fedfm.Progress())
    assert capsys.readouterr().err == ""
