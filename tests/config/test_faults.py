"""One message contains all faults of a file, and only these."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.api.pretrain_spec import Pretraining
from fedfm.config.experiment import Experiment
from fedfm.core.toml_text import put, to_toml
from fedfm.encrypted.student.distil_spec import Distillation
from fedfm.errors import InputError
from fedfm.sites import federation_config, silo_config
from fedfm.sites.identity import roster_in

GOOD = {
    "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 4}},
    "method": {"name": "fedavg", "rounds": 2, "local": {"name": "adam", "learning_rate": 0.01}},
    "run": {"seed": 1},
}
FAULTS = {  # key: a wrong value
    "surplus": 1,
    "data.rows": 3,
    "data.name": 3,
    "data.test_fraction": 2.0,
    "data.limit": "many",
    "data.partition.clients": "four",
    "data.partition.name": "dirichle",
    "model.name": 3,
    "model.dtype": "float99",
    "model.max_lenght": 5,
    "model.adaptation.rank": 0,
    "method.rounds": "ten",
    "method.lr": 0.1,
    "method.local.learning_rate": -1.0,
    "run.engine": "cloud",
    "run.workers": -1,
    "aggregation.called": "median",
    "privacy.unit": "clint",
    "privacy.clip_norm": -1.0,
    "privacy.noise_multiplier": "some",
}
SILO = {  # a silo's file without a fault, and wrong values
    "": {"name": "a", "data": "rows.csv", "budget": {"rounds": 3}},
    "name": 3,
    "data": 4,
    "labl": "x",
    "allow": ["men"],
    "allow_by_method": {"fedav": ["mean"]},
    "allow_methods": ["fedav"],
    "device": "tpu",
    "downloads": "no",
    "server": "key",
    "budget.epsilon": -1.0,
    "budget.rounds": "few",
    "require.smallest_cohort": -1,
    "require.surplus": 1,
}
FEDERATION = {
    "": {"server": "fed.example.org:8443", "silos": ["a", "b"]},
    "server": "0.0.0.0",
    "silos": ["a", "A"],
    "classes": ["x", "x"],
    "hosts": ["255.255.255.255"],
    "days": 0,
    "proxy": "no",
    "surplus": [],
}
PRETRAINING = {
    "": {
        "data": {"name": "digits"},
        "model": {"name": "nano-vit", "weights": "random"},
        "pretrain": {"local": {"epochs": 3}},
    },
    "data.limit": -1,
    "data.surplus": 1,
    "model.dtype": "float99",
    "pretrain.factor": 3.0,
    "pretrain.seed": "one",
    "pretrain.local.epochs": 0,
    "surplus.a": 1,
}


def keys_of(found):
    """The keys with which the lines begin, sorted."""
    return sorted(line.split(":")[0].split(" = ")[0].split("[")[0].split(" is ")[0] for line in found)


def faults_of(path, tables, load=Experiment.load):
    path.write_text(to_toml(tables))
    try:
        load(path)
    except InputError as error:
        return [line.removeprefix(f"{path}: ") for line in str(error).splitlines()]
    return []


def copied(tables):
    return {k: copied(v) if isinstance(v, dict) else v for k, v in tables.items()}


@given(st.sets(st.sampled_from(sorted(FAULTS))))
@settings(max_examples=30, deadline=None)
def test_exactly_the_faults_of_a_file_are_reported_each_once(tmp_path_factory, keys):
    tables = copied(GOOD)
    if any(key.startswith("privacy.") for key in keys):
        tables["privacy"] = {"unit": "client", "noise_multiplier": 1.0, "delta": 1e-3, "clip_norm": 1.0}
    for key in keys:
        put(tables, key, FAULTS[key])
    found = faults_of(tmp_path_factory.getbasetemp() / "faults.toml", tables)
    assert keys_of(found) == sorted(keys)
    # `key=` is for programs: a reader finds the key once, at the beginning.
    assert not [line for line in found if re.match(r"([\w.]+)( = [^:]*)?: \1\b", line)]


@pytest.mark.parametrize(
    ("wrong", "load"),
    [(SILO, silo_config.load), (FEDERATION, federation_config.load), (PRETRAINING, Pretraining.load)],
    ids=["silo", "federation", "pretraining"],
)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_exactly_the_faults_of_every_other_kind_of_file_are_reported(tmp_path_factory, wrong, load, data):
    """Each fault is the same alone and among others; rules on whole values wait for values of the right type."""
    keys = data.draw(st.sets(st.sampled_from(sorted(wrong.keys() - {""})), min_size=1))
    tables = copied(wrong[""])
    for key in keys:
        put(tables, key, wrong[key])
    found = keys_of(faults_of(tmp_path_factory.getbasetemp() / "other.toml", tables, load))
    assert len(found) == len(set(found))
    assert set(found) <= {key.removesuffix(".a") for key in keys}
    missed = {key.removesuffix(".a") for key in keys} - set(found)
    assert missed <= (
        {"allow_by_method", "allow_methods"} if wrong is SILO else {"server", "silos", "classes", "hosts"}
    )
    assert not missed or wrong is not PRETRAINING


def test_missing_keys_are_reported_with_wrong_ones(tmp_path):
    assert keys_of(faults_of(tmp_path / "s.toml", {"labl": "x"}, silo_config.load)) == ["data", "labl", "name"]
    assert keys_of(faults_of(tmp_path / "s.toml", {"name": 3}, silo_config.load)) == ["data", "name"]
    assert keys_of(faults_of(tmp_path / "f.toml", {"days": 0}, federation_config.load)) == ["days", "server", "silos"]
    tables = copied(GOOD) | {"privacy": {"aggregatr": "secagg"}}
    put(tables, "run.workers", -1)
    found = keys_of(faults_of(tmp_path / "e.toml", tables))
    assert found == ["privacy.aggregatr", "privacy.delta", "privacy.unit", "run.workers"]


def test_a_key_that_two_readers_refuse_is_reported_once(tmp_path):
    tables = copied(GOOD)
    put(tables, "method.name", "json:loads")
    put(tables, "run.workers", -1)
    assert keys_of(faults_of(tmp_path / "e.toml", tables)) == ["method.name", "run.workers"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def f(:", r"SyntaxError: .*line 1"),
        ("x = 1\n1 / 0", r"ZeroDivisionError: .*line 2"),
        ("import no_such_module", "No module named 'no_such_module'"),
    ],
)
def test_a_users_module_that_cannot_be_imported_is_a_fault_of_the_file(tmp_path, monkeypatch, text, why):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"brought_{abs(hash(text))}"
    (tmp_path / f"{name}.py").write_text(text)
    named = {"data": {"name": f"{name}:f"}, "model": {"name": f"{name}:f"}, "method": {"name": "fedavg"}}
    for tables, key in ((copied(GOOD), "method.name"), (named, "data.name")):
        put(tables, key, f"{name}:f")
        (found,) = faults_of(tmp_path / "e.toml", tables)
        assert re.match(f'{key} = "{name}:f": {why}', found)


def test_every_fault_of_a_roster_is_reported(tmp_path):
    path = tmp_path / "roster.toml"
    path.write_text(to_toml({"a": "f" * 64, "b": "f" * 63, "c": 3, "../d": "f" * 64}))
    with pytest.raises(InputError) as refused:
        roster_in(path)
    assert [line.partition("roster.toml: ")[2].split(" ")[0] for line in str(refused.value).splitlines()] == [
        *("the", "the", '"../d"'),
    ]


def test_faults_beyond_the_limit_are_counted(tmp_path):
    tables = copied(GOOD)
    tables["run"] |= {f"key{i}": i for i in range(60)}
    found = faults_of(tmp_path / "e.toml", tables)
    assert len(found) == 51
    assert found[-1] == "10 more faults"


def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 100_000)
    for load in (silo_config.load, roster_in, Experiment.load, federation_config.load):
        with pytest.raises(InputError, match=r"deep\.toml"):
            load(path)


@pytest.mark.parametrize(
    ("key", "value", "first"),
    [("method.name", "fedavgg", "method.name"), ("data.name", "digitz", "data.name"), ("model.name", 3, "model.name")],
)
def test_consequences_of_a_wrong_name_are_not_reported(tmp_path, key, value, first):
    tables = copied(GOOD)
    put(tables, key, value)
    found = faults_of(tmp_path / "e.toml", tables)
    assert len(found) == 1
    assert found[0].startswith(first)


def test_a_rule_between_tables_is_reported_with_a_bound(tmp_path):
    tables = copied(GOOD) | {"privacy": {"unit": "client", "target_epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}}
    put(tables, "privacy.aggregator", "secagg")
    put(tables, "aggregation.name", "median")
    put(tables, "run.workers", -1)
    found = faults_of(tmp_path / "e.toml", tables)
    assert any(line.startswith("run.workers") for line in found)
    assert len(found) >= 2


def test_all_faults_of_a_distillation_are_reported(tmp_path):
    tables = {
        "data": {"name": "digits"},
        "model": {"name": "nano-vit"},
        "distil": {"views": 0, "epoch": 3, "decay": 0.0},
    }
    found = faults_of(tmp_path / "t.toml", tables, Distillation.load)
    assert {line.split(":")[0].split(" = ")[0] for line in found} == {"distil.views", "distil.epoch", "distil.decay"}
