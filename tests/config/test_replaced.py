"""One file for several methods: keys of a replaced method are left out with a notice, and other keys are refused."""

import dataclasses

import pytest

import small
from every_method import METHODS
from fedfm.config.experiment import Experiment
from fedfm.config.replaced import without_former_keys
from fedfm.config.toml import build_named, to_toml
from fedfm.core.fields import check
from fedfm.errors import InputError

FORMERS = [
    {"name": "fedavg", "rounds": 3, "fraction": 0.5, "local": {"learning_rate": 0.1, "momentum": 0.9}},
    {"name": "fedprox", "rounds": 3, "mu": 0.1, "local": {"name": "adamw", "learning_rate": 0.01}},
    {"name": "fedpft", "rounds": 1, "components": 2, "covariance": "full", "head": {"epochs": 2}},
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("former", FORMERS, ids=[f["name"] for f in FORMERS])
def test_every_method_takes_what_is_left(former, name):
    told = []
    tables = {"method": {**former, "name": name}}
    found = without_former_keys(tables, former, ["method.name"], told.append)["method"]
    gone = former.keys() - found.keys()
    assert len(told) >= len(gone)
    assert all(any(text.startswith(f"method.{key} of the file is left out") for text in told) for key in gone)
    assert tables == {"method": {**former, "name": name}}  # unchanged
    method = build_named("methods", found, "method")[1]
    if name in ("fedbaf", "blindfed", "weight_init"):  # they have a key without a default
        method = dataclasses.replace(method, foundation="x")
    check(method, "method")
    method.validate()


def load(folder, method, overrides, **more):
    (folder / "e.toml").write_text(to_toml(small.experiment(folder) | {"method": method}))
    return Experiment.load(folder / "e.toml", overrides, **more)


def test_only_a_replaced_method_has_former_keys(tmp_path):
    told = []
    e = load(tmp_path, FORMERS[0], {"method.name": "fedpft"}, tell=told.append)
    assert (e.method_name, e.method.rounds) == ("fedpft", 1)
    assert sorted(text.split(" ")[0] for text in told) == ["method.fraction", "method.local", "method.rounds"]
    with pytest.raises(InputError, match=r"method\.\w+: unknown key"):
        load(tmp_path, FORMERS[0], {"method.name": "fedpft"})  # nobody would hear of it
    for method, overrides in (
        ({**FORMERS[0], "name": "fedpft"}, {}),  # nothing is replaced
        ({**FORMERS[0], "name": "fedpft"}, {"method.name": "fedpft"}),
        ({**FORMERS[0], "roundz": 3}, {"method.name": "fedpft"}),  # a key of neither
        (FORMERS[2], {"method.name": "fedavg", "method.components": 5}),  # of the command line
        (FORMERS[0], {"method.name": "fedpft", "method.local.epochs": 5}),
    ):
        with pytest.raises(InputError, match=r"method\."):
            load(tmp_path, method, overrides, tell=told.append)
