"""Notices before the first round: columns in other units, modules that no federation can train."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import fedfm
from fedfm.cli import main
from fedfm.errors import InputError
from small import experiment


def scale_column(folder, factor):
    """The small experiment with column 2 in other units."""
    tables = experiment(folder, method={"name": "fedavg", "rounds": 1}, run={"workers": 1})
    path = tables["data"]["path"]
    with np.load(path) as file:
        arrays = dict(file)
    arrays["x"] = arrays["x"].astype(np.float32)
    arrays["x"][:, 2] *= factor
    np.savez(path, **arrays)
    return tables, float(np.abs(arrays["x"][:, 2]).max())


class TestColumns:
    def test_a_column_beyond_float32_is_refused_with_its_largest_value(self, tmp_path):
        tables, most = scale_column(tmp_path, 1e30)
        with pytest.raises(
            InputError, match=rf"column x\[:, 2\] has values up to {most:.3g}.*data\.scale".replace("+", r"\+")
        ):
            fedfm.run(tables, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_column_that_dominates_the_others_is_reported(self, tmp_path):
        tables, most = scale_column(tmp_path, 1e9)
        result = fedfm.run(tables, tmp_path / "run")
        notices = fedfm.load_run(result["run"]).manifest["notices"]
        assert [f"column x[:, 2] has values up to {most:.3g}" in text for text in notices] == [True]

    @pytest.mark.parametrize(("times", "scale"), [(1.0, "none"), (1e3, "none"), (1e-3, "none"), (1e3, "unit")])
    def test_clients_with_other_units_are_reported(self, tmp_path, times, scale):
        rng = np.random.default_rng(0)
        for name, factor in (("north", 1.0), ("south", times)):
            x = (factor * rng.normal(size=(40, 5))).astype(np.float32)
            np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(40) % 2)
        files = {name: str(tmp_path / f"{name}.npz") for name in ("north", "south")}
        tables = {
            "data": {"clients": files, "scale": scale},
            "model": {"name": "features"},
            "method": {"name": "fedavg", "rounds": 0},
            "run": {"workers": 1},
        }
        notices = fedfm.load_run(fedfm.run(tables, tmp_path / "run")["run"]).manifest["notices"]
        assert any("different units" in text for text in notices) == (times != 1 and scale == "none")

    def test_alike_columns_are_not_told(self, tmp_path):
        tables, _ = scale_column(tmp_path, 100.0)
        assert not fedfm.load_run(fedfm.run(tables, tmp_path / "run")["run"]).manifest["notices"]


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, 2, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.w).real


def damage():
    net = nn.Linear(4, 2)
    net.weight.data[1, 1] = float("nan")
    return net


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)), r"0\.weight has no shape yet"),
        (lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 2)), r"0\.weight has no shape yet"),
        (Complex, "w is complex64"),
        (damage, "weight has NaN or infinity before any training"),
    ],
)
def test_a_module_that_cannot_be_federated_is_refused_by_name(module, what, tmp_path):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    with pytest.raises(InputError, match=f"^model: {what}"):
        fedfm.federate(module(), train=data, partition={"clients": 2}, loss=cross_entropy, out=tmp_path / "run")


def test_a_run_that_cannot_start_leaves_two_and_no_folder(tmp_path, capsys):
    tables, _ = scale_column(tmp_path, 1e30)
    file = tmp_path / "run.toml"
    file.write_text(
        f'[data]\npath = "{tables["data"]["path"]}"\n[model]\nname = "features"\n[method]\nname = "fedavg"\n'
    )
    for command in (["check", str(file)], ["run", str(file), "--out", str(tmp_path / "run")]):
        assert main(command) == 2
        assert "x[:, 2]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
