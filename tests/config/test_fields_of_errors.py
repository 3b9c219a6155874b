"""Programs use only the fields of a refusal: if every message is the same word, they behave the same."""

import ast
import re
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedfm
from fedfm.config.experiment import Experiment
from fedfm.config.replaced import without_former_keys
from fedfm.config.single_tables import SPECS
from fedfm.core.fields import settings_of
from fedfm.core.toml_text import copy_tables, put, to_toml
from fedfm.errors import FaultyFile, InputError, lines_of
from fedfm.methods.ditto import Ditto
from fedfm.methods.fedamp import FedAMP
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbaf.fedbaf import FedBaF
from fedfm.methods.scaffold import Scaffold
from fedfm.sites import consent_rules, silo_config
from fedfm.training import SGD, Adam

GOOD = {
    "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 4}},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 4}},
    "method": {"name": "fedavg", "rounds": 2, "local": {"name": "adam", "learning_rate": 0.01}},
    "run": {"seed": 1},
}
PLACES = {**SPECS, "method": FedAvg, "method.local": SGD}
KEYS = sorted({key for cls in (*PLACES.values(), Adam, Ditto) for key, _, _ in settings_of(cls)})
WORDS = [*KEYS, "lr", "opt", "optimizer", "lambda", "n_clients", "epsilon", "path", "lora_alpha", "cuda", "rule"]
TYPO = {"dropped": lambda key: key[1:] or "x", "doubled": lambda key: key + key[-1], "as it is": lambda key: key}
VALUES = [-1, 2.5, "x", True, [], [3], {}, {"name": "x"}, 1 << 40]
change = st.tuples(
    st.sampled_from(["", *sorted(PLACES)]),
    st.sampled_from(WORDS),
    st.sampled_from(sorted(TYPO)),
    st.sampled_from(VALUES),
)


@contextmanager
def wordless():
    """All refusals say one word."""
    init = InputError.__init__

    def of_one_word(self, text="", **fields):
        init(self, "wrong", **fields)

    with mock.patch.object(InputError, "__init__", of_one_word):
        yield


def fields_of(path):
    try:
        Experiment.load(path)
    except FaultyFile as error:
        return [(type(f).__name__, f.key, f.owners, f.allowed, getattr(f, "hint", None)) for f in error.found]
    return []


@given(st.lists(change, min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_hints_keys_and_all_faults_need_no_message(tmp_path_factory, changes):
    tables = copy_tables(GOOD)
    for table, word, typo, value in changes:
        key = TYPO[typo](word)
        try:
            put(tables, f"{table}.{key}" if table else key, value)
        except InputError:  # an earlier change has put a value in place of the table
            continue
    path = tmp_path_factory.getbasetemp() / "fields.toml"
    path.write_text(to_toml(tables))
    found = fields_of(path)
    with wordless():
        assert fields_of(path) == found
    assert all(key for _, key, *_ in found)


@pytest.mark.parametrize("name", ["fedpft", "scaffold", "fedncm", "ensemble"])
def test_keys_of_a_replaced_method_are_found_without_messages(name):
    former = {"name": "fedavg", "rounds": 3, "fraction": 0.5, "local": {"learning_rate": 0.1, "momentum": 0.9}}
    tables = {"method": {**former, "name": name}}
    found = without_former_keys(tables, former, ["method.name"], lambda line: None)
    assert found != tables
    with wordless():
        assert without_former_keys(tables, former, ["method.name"], lambda line: None) == found


@pytest.mark.parametrize(
    ("base", "key"),
    [(FedAMP(alpha=1.0), "method.base.alpha"), (Scaffold(), "method.local"), (FedAvg(), "")],
)
def test_a_fault_of_a_base_is_of_the_key_that_the_user_wrote(base, key):
    """A base's own keys stand in [method.base], those that the outer method gives it in [method]."""

    def of_base():
        try:
            FedBaF(base=base, foundation="x", local=Adam() if key == "method.local" else SGD()).validate()
        except InputError as error:
            return error.key
        return ""

    assert of_base() == key
    with wordless():
        assert of_base() == key


def test_the_message_of_a_fault_that_moves_names_its_new_key():
    fault = InputError("model.name: no such folder", key="model.name", allowed="a folder")
    moved = fault.move("method.foundation")
    assert (str(moved), moved.key, moved.allowed) == (
        "method.foundation: no such folder",
        "method.foundation",
        "a folder",
    )
    assert str(InputError("no such folder").move("data")) == "data: no such folder"


def test_a_silo_gets_every_fault_of_its_file_and_every_unmet_term(tmp_path):
    path = tmp_path / "silo.toml"
    path.write_text('name = "a"\ndata = "x.npz"\nbudgt = 3\nallow_methods = ["fedav"]\n')
    with pytest.raises(FaultyFile) as refused:
        silo_config.load(path)
    assert [fault.key for fault in refused.value.found] == ["budgt", "allow_methods"]
    assert len(lines_of(refused.value)) == 2
    path.write_text('name = "a"\ndata = "x.npz"\nallow_methods = ["fedprox"]\n[require]\nunit = "record"\n')
    with pytest.raises(InputError) as unmet:
        consent_rules.check(silo_config.load(path), Experiment.from_dict(GOOD))
    assert [fault.key for fault in unmet.value.all] == ["method.name", "require.unit"]
    assert len(lines_of(unmet.value)) == 2


NAMES_A_KEY = re.compile(r"\[[a-z_]+(\.\w+)*\]|[a-z_]\w*(\.\w+)+(?=[:\[ ])")
READERS = (
    "config",
    "methods",
    "aggregation",
    "attacks",
    "training",
    "privacy/spec.py",
    "data/spec.py",
    "data/partition.py",
    "data/partition_columns.py",
)


def refusals():
    root = Path(fedfm.__file__).parent
    for part in READERS:
        place = root / part
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
                if name in ("InputError", "Absent", "say") and node.args:
                    yield f"{path.relative_to(root)}:{node.lineno}", node


def test_a_message_that_begins_with_a_key_has_it_as_a_field():
    bare = []
    for place, call in refusals():
        text = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
        if isinstance(text, ast.Constant) and NAMES_A_KEY.match(str(text.value)):
            bare += [place] if "key" not in {keyword.arg for keyword in call.keywords} else []
    assert bare == []
