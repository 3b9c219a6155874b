"""All faults of a file in one message: none is lost, and none is made up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.config.experiment import Experiment
from fedfm.core.toml_text import put, to_toml
from fedfm.errors import InputError
from fedfm.runtime.distil_spec import Distillation

GOOD = {
    "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 4}},
    "method": {"name": "fedavg", "rounds": 2, "local": {"name": "adam", "learning_rate": 0.01}},
    "run": {"seed": 1},
}
FAULTS = {  # key: a wrong value
    "surplus": 1,
    "data.rows": 3,
    "data.test_fraction": 2.0,
    "data.partition.clients": "four",
    "data.partition.name": "dirichle",
    "model.dtype": "float99",
    "model.max_lenght": 5,
    "model.adaptation.rank": 0,
    "method.rounds": "ten",
    "method.lr": 0.1,
    "method.local.learning_rate": -1.0,
    "run.engine": "cloud",
    "run.workers": -1,
    "aggregation.called": "median",
}


def faults_of(path, tables, kind=Experiment):
    path.write_text(to_toml(tables))
    try:
        kind.load(path)
    except InputError as error:
        return [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
    return []


def copied(tables):
    return {k: copied(v) if isinstance(v, dict) else v for k, v in tables.items()}


@given(st.sets(st.sampled_from(sorted(FAULTS))))
@settings(max_examples=60, deadline=None)
def test_each_fault_is_told_once_and_nothing_else(tmp_path_factory, keys):
    tables = copied(GOOD)
    for key in keys:
        put(tables, key, FAULTS[key])
    found = faults_of(tmp_path_factory.getbasetemp() / "faults.toml", tables)
    begins = [line.split(":")[0].split(" = ")[0] for line in found]
    assert sorted(begins) == sorted(keys)


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [("method.name", "fedavgg", "method.name"), ("data.name", "digitz", "data.name"), ("model.name", 3, "model.name")],
)
def test_what_follows_from_a_wrong_name_is_not_told(tmp_path, key, value, first):
    tables = copied(GOOD)
    put(tables, key, value)
    found = faults_of(tmp_path / "e.toml", tables)
    assert len(found) == 1
    assert found[0].startswith(first)


def test_a_rule_between_tables_is_told_beside_a_bound(tmp_path):
    tables = copied(GOOD) | {"privacy": {"unit": "client", "target_epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}}
    put(tables, "privacy.aggregator", "secagg")
    put(tables, "aggregation.name", "median")
    put(tables, "run.workers", -1)
    found = faults_of(tmp_path / "e.toml", tables)
    assert any(line.startswith("run.workers") for line in found)
    assert len(found) >= 2


def test_a_distillation_tells_all_faults(tmp_path):
    tables = {
        "data": {"name": "digits"},
        "model": {"name": "nano-vit"},
        "distil": {"views": 0, "epoch": 3, "decay": 0.0},
    }
    found = faults_of(tmp_path / "t.toml", tables, Distillation)
    assert {line.split(":")[0].split(" = ")[0] for line in found} == {"distil.views", "distil.epoch", "distil.decay"}
