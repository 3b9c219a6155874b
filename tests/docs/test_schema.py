"""The JSON Schemas: every example of the documents is valid, and the schema refuses what fedfm refuses."""

import copy
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fedfm.cli import main
from fedfm.config import registry
from fedfm.config.catalogue import SCHEMAS, schema
from fedfm.config.experiment import Experiment
from fedfm.config.registry import ours, resolve
from fedfm.config.run_spec import RunSpec
from fedfm.config.toml import build, build_named, refuse_unknown
from fedfm.core.capabilities import HiddenModel
from fedfm.core.fields import check, is_required, settings_of
from fedfm.data.spec import DataSpec
from fedfm.data.spec import check as check_data
from fedfm.errors import InputError
from fedfm.models.spec import ModelSpec
from fedfm.privacy.spec import PrivacySpec
from fedfm.sites import silo_config
from small import experiment

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```toml[^\n]*\n(?P<text>.*?)^```$", re.M | re.S)
VALID = {which: jsonschema.Draft202012Validator(schema(which)) for which in SCHEMAS}
FOLDERS = ("examples", "reproduce", "benchmarks", "docs")


def schema_accepts(tables, which="experiment"):
    return VALID[which].is_valid(tables)


def complaint(tables, which="experiment"):
    error = jsonschema.exceptions.best_match(VALID[which].iter_errors(tables))
    return error and f"{error.json_path}: {error.message}"


def of(tables):
    """Which file the tables are of."""
    own = next((name for name in ("pretrain", "distil") if name in tables), "")
    return own or ("experiment" if "method" in tables else "federation" if "silos" in tables else "silo")


def written():
    """(place, tables) of every whole TOML file that the documents and folders show."""
    for page in (*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))):
        for i, m in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8"))):
            if m["mark"] != "no experiment":
                yield f"{page.relative_to(ROOT)} {i}", m["text"]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.toml")):
            if not {"pyproject.toml", "runs"} & set(path.parts):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


WRITTEN = [
    (place, tables) for place, text in written() if {"name", "data", "server"} & (tables := tomllib.loads(text)).keys()
]


@pytest.mark.parametrize("which", SCHEMAS)
def test_each_schema_is_valid_json_schema(which):
    jsonschema.Draft202012Validator.check_schema(schema(which))
    jsonschema.Draft7Validator.check_schema(schema(which))  # what some editors' plugins take it as


@pytest.mark.parametrize(("place", "tables"), WRITTEN, ids=[place for place, _ in WRITTEN])
def test_every_example_is_valid(place, tables):
    assert complaint(tables, of(tables)) is None


def test_examples_of_each_kind_were_found():
    assert {of(tables) for _, tables in WRITTEN} == set(SCHEMAS)


@pytest.mark.parametrize("method", ours("methods"))
def test_an_experiment_with_every_default_written_out_is_valid(method):
    table = {"name": method} | ({"foundation": "nano-vit"} if "foundation" in fields(method) else {})
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": table}
    needs = resolve("methods", method)().needs
    if isinstance(resolve("methods", method)(), HiddenModel):
        del tables["model"]
    elif needs.adaptations:
        tables["model"]["adaptation"] = {"name": needs.adaptations[0]}
    if needs.tasks:
        tables["model"]["task"] = needs.tasks[0]
    assert complaint(tables) is None
    assert complaint(Experiment.from_dict(tables).to_dict()) is None


def test_the_suites_own_experiment_is_valid(tmp_path):
    assert complaint(experiment(tmp_path)) is None


def fields(method):
    return {key for key, _, _ in settings_of(resolve("methods", method))}


# --- the schema and the parser agree ----------------------------------------------------------------------------------


def parser_accepts(tables):
    """Whether each table, on its own, is one that fedfm takes; rules between tables are not asked."""
    try:
        refuse_unknown(tables, {"name", "data", "model", "method", "privacy", "attack", "aggregation", "run"}, "")
        check_data(build(DataSpec, tables["data"], "data"))
        for key, cls in {"model": ModelSpec, "privacy": PrivacySpec, "run": RunSpec}.items():
            if key in tables and (key, tables[key]) != ("privacy", {"aggregator": "secagg"}):
                check(build(cls, tables[key], key), key)
        for key, kind, usual in (
            ("method", "methods", ""),
            ("attack", "attacks", ""),
            ("aggregation",) * 2 + ("mean",),
        ):
            if key in tables:
                made = build_named(kind, tables[key], key, default=usual)[1]
                check(made, key)
                if key == "method" and isinstance(made, HiddenModel) == ("model" in tables):
                    return False
    except InputError as error:
        assume("set it once" not in str(error))  # of FedBaF's base: a rule between two tables
        return False
    return True


START = {
    "data": {"name": "digits", "limit": 100, "val_fraction": 0.1, "scale": "none", "where": {"site": ["a"]}},
    "model": {"name": "nano-vit", "max_length": 8, "device": "cpu", "options": {"width": 3}},
    "privacy": {"unit": "record", "target_epsilon": 1.0, "delta": 1e-5},
    "run": {"engine": "local", "seed": 3, "timeout": 1.5, "target_accuracy": 0.5, "wire": True},
}
PARTITIONS = [
    {"clients": 3},
    {"name": "dirichlet", "alpha": 0.5, "clients": 3},
    {"name": "by_class", "classes_per_client": 2},
    {"name": "by_column", "column": "site"},
    {"name": "flower", "partitioner": "IidPartitioner", "options": {"a": 1}},
]
ODD = [-1, 0, 1, 2, 65_537, 2**21, -0.5, 0.25, 0.5, 1.5, 1e-300, float("inf"), -float("inf"), True, False, "", " ", "a"]
ODD += ["sgd", "fedavg", "full", "cuda:1", "size", "none", [], [1], [0], ["a"], [[]], {}, {"a": 1}, {"name": "sgd"}]


def defaults(cls):
    """A table of the keys of a class that have a plain default, and of those that are required."""
    table = {}
    for key, f, _ in settings_of(cls):
        value = f.metadata.get("usual", f.default)
        if isinstance(value, (bool, int, float, str, tuple)) and value != "":
            table[key] = 0.5 if is_required(f) else list(value) if isinstance(value, tuple) else value
    return table


def choose(draw, kind):
    name = draw(st.sampled_from(ours(kind)))
    return {"name": name} | defaults(resolve(kind, name))


@st.composite
def experiments(draw):
    """Tables that fedfm takes one by one, with every key of a method, an attack, an aggregation."""
    tables = copy.deepcopy(START)
    tables["data"]["partition"] = copy.deepcopy(draw(st.sampled_from(PARTITIONS)))
    tables["model"]["adaptation"] = {"name": draw(st.sampled_from(["lora", "head", "top_layers"])), "rank": 4}
    tables["method"] = choose(draw, "methods")
    known = fields(tables["method"]["name"])
    if "local" in known:
        tables["method"]["local"] = choose(draw, "optimisers")
    if "head" in known:
        tables["method"]["head"] = {"optimizer": "adam", "l2": 0.1, "epochs": 3}
    if "foundation" in known:
        tables["method"]["foundation"] = "nano-vit"
    if "base" in known:
        tables["method"]["base"] = {"name": "fedprox", "mu": 0.5}
    if isinstance(resolve("methods", tables["method"]["name"])(), HiddenModel):
        del tables["model"]
    tables["attack"], tables["aggregation"] = choose(draw, "attacks"), choose(draw, "aggregation")
    return tables


def places(table, path=()):
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(experiments())
def test_drawn_experiments_are_valid(tables):
    assert parser_accepts(tables)
    assert complaint(tables) is None


@pytest.mark.proof
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(experiments(), st.data())
def test_a_changed_experiment_is_refused_by_both_or_by_neither(tables, data):
    *path, key = data.draw(st.sampled_from(sorted(p for p in places(tables) if len(p) > 1)))
    table = tables
    for part in path:
        table = table[part]
    match data.draw(st.sampled_from(["value", "value", "misspell", "add", "drop"])):
        case "value":
            table[key] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
        case "misspell":
            table[f"{key}s"] = table.pop(key)
        case "add":
            table[data.draw(st.sampled_from(["mu", "rank", "alpha", "name", "foo"]))] = data.draw(st.sampled_from(ODD))
        case "drop":
            del table[key]
    assert schema_accepts(tables) == parser_accepts(tables), complaint(tables)
    if not schema_accepts(tables):
        with pytest.raises(InputError):
            Experiment.from_dict(tables)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"method": {"name": "fedprox", "muh": 0.1}}, "method.muh: unknown key"),
        ({"method": {"name": "fedprox", "mu": -1}}, "method.mu = -1.0: expected a finite number of at least 0"),
        ({"method": {"name": "fedprox", "mu": "high"}}, 'method.mu = "high": expected a number'),
        ({"method": {"name": "fedproxy"}}, 'did you mean "fedprox"'),
        ({"method": {"name": "fedavg", "local": {"momentum": 1.0}}}, "method.local.momentum = 1.0: expected a number"),
        ({"method": {"name": "fedbaf"}}, "method.foundation is missing"),
        ({"data": {"name": "digits", "path": "a.csv"}}, "exactly one of name, path, hub, clients"),
        ({"data": {"name": "digits", "partition": {"alpha": 0.1}}}, 'belongs to "dirichlet", not to "iid"'),
        (
            {"run": {"engine": "spark"}},
            'run.engine = "spark": expected "local", "simulation", "deployment" or "folder"',
        ),
        ({"runs": {}}, "runs: unknown key"),
        ({"name": "a/b"}, "without slashes"),
        ({"attack": {"name": "sign_flip"}}, "attack.fraction is missing: expected a number in (0, 1]"),
        ({"privacy": {"unit": "record", "target_epsilon": 1.0}}, "privacy.delta is missing"),
    ],
)
def test_editors_and_fedfm_refuse_the_same(change, said):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}}
    assert schema_accepts(tables)
    assert not schema_accepts(tables | change)
    with pytest.raises(InputError, match=re.escape(said)):
        Experiment.from_dict(tables | change)


@pytest.mark.parametrize("name", ["a b", " ", "", "x" * 200, "x" * 201, "a\\b", "a/b", "naïve", "a\n", "."])
def test_names_of_runs(name):
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}, "method": {"name": "fedavg"}, "name": name}
    try:
        Experiment.from_dict(tables)
    except InputError:
        assert not schema_accepts(tables)
    else:
        assert schema_accepts(tables)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"name": "a/b"},
        {"name": ""},
        {"data": ""},
        {"allow": ["mean"]},
        {"allow": ["no"]},
        {"downloads": 1},
        {"x": 1},
    ],
)
def test_a_silos_file(change, tmp_path):
    tables = {"name": "north", "data": "rows.csv"} | change
    (tmp_path / "silo.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in tables.items()))
    try:
        silo_config.load(tmp_path / "silo.toml")
    except InputError:
        assert not schema_accepts(tables, "silo")
    else:
        assert schema_accepts(tables, "silo")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_it(tmp_path, capsys):
    for which in SCHEMAS:
        assert main(["schema", which]) == 0
        assert json.loads(capsys.readouterr().out) == schema(which)
    out = tmp_path / "fedfm.schema.json"
    assert main(["schema", "--out", str(out)]) == 0
    assert f"#:schema ./{out.name}" in capsys.readouterr().out
    assert json.loads(out.read_text()) == schema("experiment")


def test_the_command_imports_no_heavy_library():
    code = (
        "import sys; from fedfm.cli import main; main(['schema'])\n"
        "heavy = {'torch', 'transformers', 'flwr', 'numpy', 'peft'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_key_says_its_meaning_default_and_bounds():
    variants = {v["properties"]["name"].get("const"): v for v in schema("experiment")["$defs"]["methods"]["oneOf"]}
    assert variants["fedprox"]["properties"]["mu"] == {
        "description": "weight of the proximal term; a finite number of at least 0",
        "default": 0.01,
        "type": "number",
        "minimum": 0,
        "maximum": sys.float_info.max,
    }
    assert variants["fedprox"]["properties"]["server_term"]["enum"] == ["none", "inside", "literal"]
    assert variants["feddpa"]["properties"]["local"]["default"] == {"name": "dual_adapter"}
    assert "arXiv:1812.06127" in variants["fedprox"]["description"]


def test_classes_of_others_are_names_too(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[fedfm.methods]\nmine = a_plugin:Mine\n")
    (tmp_path / "a_plugin.py").write_text(
        '"""Mine: a plugin."""\nfrom dataclasses import dataclass\nfrom fedfm.core.fields import setting\n'
        "from fedfm.methods.fedavg import FedAvg\n\n@dataclass(frozen=True)\nclass Mine(FedAvg):\n"
        '    """Moves less."""\n\n    eta: float = setting(0.5, "step", gt=0)\n    bare: int = 3\n'
    )
    tables = {"data": {"name": "digits"}, "model": {"name": "nano-vit"}}
    by_name, by_class = ({"method": {"name": name, "eta": 0.1}} for name in ("mine", "a_plugin:Mine"))
    assert schema_accepts(tables | by_class)
    assert not schema_accepts(tables | by_name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_admitted", {})
    own = jsonschema.Draft202012Validator(schema("experiment"))
    assert own.is_valid(tables | by_name)
    assert "a_plugin" not in sys.modules
    assert main(["show", "mine"]) == 0
    shown = capsys.readouterr().out
    assert "eta = 0.5" in shown
    assert "step; a number above 0" in shown
    assert "bare = 3" in shown
    del sys.modules["a_plugin"]
