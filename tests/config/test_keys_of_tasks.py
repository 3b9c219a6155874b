"""Keys that tasks add to tables: only the tasks whose keys a table sets are asked for, and equal tables stay equal."""

import copy
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import small
from fedfm.config.experiment import Experiment
from fedfm.config.faults import read_all
from fedfm.config.toml import build, plain
from fedfm.core import tasks
from fedfm.core.fields import settings_of
from fedfm.core.open_settings import complete_class
from fedfm.data.spec import DataSpec, check
from fedfm.errors import FaultyFile, InputError
from fedfm.models.spec import ModelSpec
from fedfm.sites.silo_config import Silo

NAMES = (None, *tasks.names())
OTHERS = {key: of.default for key, (_, of) in tasks.model_settings().items()}


def test_common_keys_ask_for_no_task(asked):
    for spec in (ModelSpec("m"), DataSpec(path="x.csv", kind="image"), Silo("north", "x.csv")):
        assert spec.added_keys() == ()
        assert build(type(spec), plain(spec), "") == spec
        assert dataclasses.replace(spec, name="other").added_keys() == ()
    assert DataSpec().column("instruction") == "instruction"
    assert not asked


@pytest.mark.parametrize("name", tasks.names())
def test_a_named_task_is_the_only_one_that_its_keys_ask_for(name, asked):
    spec = ModelSpec("m", task=name)
    assert build(ModelSpec, plain(spec), "") == spec
    assert asked <= {name}
    assert spec.added_keys() == tuple(tasks.model_settings(tasks.find(name)))


@given(name=st.sampled_from(NAMES), given=st.sets(st.sampled_from(sorted(OTHERS))), changed=st.booleans())
def test_equal_values_are_equal_settings_however_they_are_given(name, given, changed):
    """The keys at their defaults may be given or not, as in manifests of older versions, which have all keys."""
    values = {"name": "m", "task": name} | ({"threshold": 0.25} if changed else {})
    spec, same = ModelSpec(**values), ModelSpec(**({key: OTHERS[key] for key in given} | values))
    assert same == spec
    assert type(same) is type(spec)
    assert plain(same) == plain(spec) == plain(dataclasses.replace(ModelSpec(task=name), **values))
    assert build(ModelSpec, plain(spec), "model") == copy.deepcopy(spec) == spec
    for key, default in OTHERS.items():
        assert getattr(spec, key) == (0.25 if key == "threshold" and changed else default)


def test_a_manifest_with_all_keys_is_the_same_experiment(tmp_path):
    experiment = Experiment.from_dict(small.experiment(tmp_path))
    table = experiment.to_dict()
    table["model"] |= {key: default for key, default in OTHERS.items() if default is not None}
    table["data"] |= {key: column.name for key, column in tasks.columns().items() if not column.several}
    old = Experiment.from_dict(table)
    assert old == experiment
    assert old.to_dict() == experiment.to_dict()


def test_unknown_keys_are_refused_with_all_that_there_are():
    with pytest.raises(InputError, match=r'data\.instructions.*did you mean "instruction".*"label_separator"'):
        build(DataSpec, {"instructions": "x"}, "data")
    with pytest.raises(TypeError, match="unexpected keyword argument 'instructions'"):
        DataSpec(instructions="x")
    with pytest.raises(AttributeError, match="DataSpec has no key 'instructions'"):
        DataSpec().instructions  # noqa: B018
    strange = build(DataSpec, {"classes": ["a", "b"], "kind": "sound"}, "data")
    with pytest.raises(
        InputError, match=r'data\.kind = "sound": expected "image", "text", "features", ".*"instruction"'
    ):
        check(strange)


def test_a_kind_of_rows_of_a_task_is_a_value_of_its_own():
    assert DataSpec(classes=(), kind="instruction") == build(DataSpec, {"classes": [], "kind": "instruction"}, "data")
    assert DataSpec(classes=(), kind="instruction") != DataSpec(classes=(), kind="text")


@pytest.mark.parametrize("kind", tasks.remote_kinds())
def test_a_server_without_rows_names_classes_where_rows_have_some(kind):
    width = {"width": 3} if kind == "features" else {}
    needed = tasks.implied_task(kind).needs_classes
    known, wrong = (("a", "b"), ()) if needed else ((), ("a", "b"))
    check(build(DataSpec, {"classes": [*known], "kind": kind, **width}, "data"))
    words = "a list of class names" if needed else rf'\[\]: rows of kind "{kind}" have no classes'
    with pytest.raises(InputError, match=rf"data\.classes = \[.*\]: expected {words}"):
        check(build(DataSpec, {"classes": [*wrong], "kind": kind, **width}, "data"))


@pytest.mark.parametrize("name", tasks.names())
def test_a_server_without_rows_names_a_kind_that_the_task_reads(name):
    task = tasks.find(name)
    for kind in tasks.remote_kinds():
        tables = {
            "data": {"classes": ["a", "b"] if tasks.implied_task(kind).needs_classes else [], "kind": kind},
            "model": {"name": "a-model", "task": name},
            "method": {"name": "fedavg"},
            "run": {"engine": "deployment"},
        }
        if kind == "features":
            tables["data"]["width"] = 3
        if kind in task.table_kinds:
            assert Experiment.from_dict(tables).data.kind == kind
        else:
            with pytest.raises(InputError, match=rf'data\.kind = "{kind}": task "{name}" reads rows of kind'):
                Experiment.from_dict(tables)


def test_a_wrong_source_of_rows_is_not_reported_as_missing_too():
    tables = {"data": {"classes": ["a"], "kind": "pairs"}, "model": {"name": "m"}, "method": {"name": "fedavg"}}
    with pytest.raises(FaultyFile) as refusal:
        read_all("exp.toml", tables, Experiment.from_dict)
    assert [fault.key for fault in refusal.value.all] == ["data.classes"]


def test_all_keys_are_listed():
    for cls, added in ((ModelSpec, OTHERS), (DataSpec, tasks.columns()), (Silo, tasks.columns())):
        assert [key for key, _, _ in settings_of(cls)] == [f.name for f in dataclasses.fields(complete_class(cls))]
        assert {f.name for f in dataclasses.fields(complete_class(cls))} - {
            f.name for f in dataclasses.fields(cls)
        } == {*added}
