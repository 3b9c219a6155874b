"""Settings that need an absent package are refused before a run starts, with the name of the package's extra."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedfm.config.experiment import Experiment
from fedfm.errors import MissingExtra

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def tables(**more):
    data = {"name": "digits", "partition": {"name": "iid", "clients": 4}}
    return {"data": data, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}} | more


@pytest.mark.parametrize(
    "privacy",
    [
        {"unit": "record", "mechanism": "dp_sgd", "noise_multiplier": 1.0, "clip_norm": 1.0, "delta": 1e-5},
        {"unit": "client", "target_epsilon": 8.0, "clip_norm": 1.0, "delta": 1e-5},
    ],
)
def test_without_the_accountant_an_epsilon_is_refused_when_the_experiment_is_read(privacy, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "fedfm.privacy.composition.find_spec", lambda name: None if name == "dp_accounting" else find(name)
    )
    with pytest.raises(MissingExtra, match=r"fedfm\[accounting\]"):
        Experiment.from_dict(tables(privacy=privacy))


WITHOUT = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "flwr" else find(name, *more)
import {module}
"""


@pytest.mark.parametrize("module", ["fedfm.engines.flower.simulation", "fedfm.engines.folder.engine", "fedfm.apps"])
def test_without_flower_what_needs_it_names_the_extra(module):
    done = subprocess.run([sys.executable, "-c", WITHOUT.format(module=module)], capture_output=True, text=True)
    assert "fedfm.errors.MissingExtra" in done.stderr
    assert "fedfm[flower]" in done.stderr


def test_a_plain_installation_brings_no_engine_and_no_accountant():
    names = {line.partition(">")[0].partition("=")[0] for line in PROJECT["dependencies"]}
    assert not names & {"flwr", "dp-accounting", "scikit-learn", "tenseal"}
    brought = {
        line.partition(">")[0].partition("[")[0] for e in PROJECT["optional-dependencies"].values() for line in e
    }
    assert {"flwr", "dp-accounting", "scikit-learn"} <= brought
