"""Experiments made in Python: from tables, from objects, and refused as those of a file."""

import dataclasses

import pytest

from fedfm import Experiment
from fedfm.attacks.sign_flip import SignFlip
from fedfm.config.run_spec import RunSpec
from fedfm.data.spec import DataSpec
from fedfm.errors import InputError
from fedfm.methods.fedprox import FedProx
from fedfm.models.spec import ModelSpec

TABLES = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedprox", "mu": 0.5}}


def test_tables_and_objects_make_the_same_as_a_file(tmp_path):
    path = tmp_path / "exp.toml"
    path.write_text('data.name = "digits"\nmodel.name = "nano-vit"\nmethod = { name = "fedprox", mu = 0.5 }')
    loaded = Experiment.load(path)
    assert Experiment(**TABLES) == loaded
    assert Experiment(DataSpec(name="digits"), ModelSpec("nano-vit"), FedProx(mu=0.5)) == loaded
    assert Experiment.from_dict(loaded.to_dict()) == loaded
    assert loaded.name == "fedprox-digits"


def test_sections_may_be_objects():
    table = Experiment(**TABLES, name="mine", run={"seed": 3}, attack={"name": "sign_flip", "fraction": 0.3})
    assert table.name == "mine"
    assert table == Experiment(**TABLES, name="mine", run=RunSpec(seed=3), attack=SignFlip(fraction=0.3))


def test_a_changed_one_keeps_the_rest():
    before = Experiment(**TABLES)
    after = dataclasses.replace(before, run=RunSpec(seed=3))
    assert after.run.seed == 3
    assert dataclasses.replace(after, run=before.run) == before


def test_the_adaptations_defaults_are_filled_in():
    adaptation = Experiment(**TABLES).to_dict()["model"]["adaptation"]
    assert adaptation["name"] == "lora"
    assert (adaptation["rank"], adaptation["alpha"]) == (8, 16.0)
    top = TABLES | {"model": {"name": "nano-vit", "adaptation": {"name": "top_layers"}}}
    assert Experiment(**top).model.adaptation.layers == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": "fedavg"}, "method = 'fedavg': expected a table"),
        ({"method": {"name": "fedavg", "roundz": 3}}, "method.roundz: unknown key"),
        ({"data": "digits"}, "data = 'digits': expected a table"),
        ({"data": DataSpec()}, "expected exactly one of name, path, hub, clients"),
        ({"model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 0}}}, "model.adaptation.rank = 0"),
        ({"method": FedProx(rounds=-1)}, "method.rounds = -1"),
        ({"attack": "sign_flip"}, "attack = 'sign_flip': expected a table"),
        ({"run": {"engine": "spark"}}, "run.engine"),
        ({"name": "a/b"}, "without slashes"),
        (
            {"method": {"name": "ditto", "local": {"name": "ditto", "optimiser": "adam", "momentum": 0.5}}},
            'method.local.momentum: only optimiser = "sgd" has one, not "adam"',
        ),
    ],
)
def test_invalid_tables_are_refused(change, said):
    with pytest.raises(InputError, match=said.replace("[", r"\[")):
        Experiment(**(TABLES | change))
