"""The configuration of a Flower app: an experiment whose single settings ``flwr run --run-config`` changes."""

import json
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from flwr.common.config import flatten_dict, fuse_dicts, parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from every_method import METHODS, experiment_of
from fedfm.config.experiment import Experiment
from fedfm.core.toml_text import to_toml
from fedfm.data.spec import WITHHELD
from fedfm.engines.flower import app_writer, run_config
from fedfm.errors import InputError
from fedfm.methods.fedbaf.fedbaf import FedBaF


def written(folder, experiment):
    """The configuration that Flower reads from the app of an experiment."""
    (folder / "given.toml").write_text(experiment.to_toml())
    app_writer.write(folder / "app", folder / "given.toml")
    folder = folder / "app"
    return flatten_dict(tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])


def changed(config, text):
    """As ``flwr run --run-config TEXT``, at the server and at the sites."""
    return run_config.merge_settings(fuse_dicts(config, parse_config_args([text]), check_keys=True))


@pytest.mark.parametrize("name", [m for m in METHODS if m not in ("centralised", "kd")])
def test_an_app_holds_every_experiment_completely(name, tmp_path):
    tables = experiment_of(name, tmp_path)
    if name == "blindfed":
        tables["method"]["encryption"] = "ckks"
    e = Experiment.from_dict(tables)
    merged = run_config.merge_settings(written(tmp_path, e) | {"home": str(tmp_path / "app")})
    assert whole(run_config.with_paths(merged)) == whole(tomllib.loads(app_writer.experiment_text(e)))


def test_an_experiment_that_no_federation_can_run_is_refused(tmp_path):
    with pytest.raises(InputError, match=r'expected run\.engine = "local"'):
        written(tmp_path, Experiment.from_dict(experiment_of("blindfed", tmp_path)))  # its encryption is "clear"
    assert not (tmp_path / "app").exists()


def whole(tables):
    """The tables with every default."""
    return Experiment.from_dict(tables).to_dict()


GIVEN = {
    "data": {"name": "digits", "label": "(default)"},
    "model": {"name": "nano-vit", "adaptation": {"name": "lora", "rank": 2}},
    "method": {"name": "fedavg", "rounds": 3},
}
CHANGES = {
    "method.name": ["fedprox", "fedadam", "scaffold", "local", "ditto", "fedbip", "flexlora", "fedper"],
    "method.local.name": ["adam", "adamw", "proximal"],
    "model.adaptation.rank": [1, 8],
    "model.adaptation.name": ["ffa_lora", "full", "head"],
    "aggregation.name": ["median", "krum", "trimmed_mean"],
    "data.test_fraction": [0.3],
}


@pytest.mark.parametrize("optimiser", [{}, {"name": "adam"}])
@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in CHANGES.items() for value in values])
def test_run_config_means_what_set_means(key, value, optimiser, tmp_path):
    tables = GIVEN | {"method": GIVEN["method"] | ({"local": optimiser} if optimiser else {})}
    (tmp_path / "given.toml").write_text(to_toml(tables))
    app_writer.write(tmp_path / "app", tmp_path / "given.toml")
    config = flatten_dict(tomllib.loads((tmp_path / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
    merged = changed(config, f"{key}={json.dumps(value)}")
    try:
        expected = Experiment.load(tmp_path / "given.toml", {key: value, "run.engine": "deployment"}).to_dict()
    except InputError as error:
        with pytest.raises(InputError, match=re.escape(str(error).partition(": ")[2])):
            whole(tomllib.loads(merged["experiment"]))
    else:
        assert whole(tomllib.loads(merged["experiment"])) == expected


def test_an_app_is_for_any_machine_and_every_line_can_be_read(tmp_path, monkeypatch):
    tables = experiment_of("fedavg", tmp_path)
    rows = Path(tables["data"]["path"])
    clients = {"north": str(rows), "south": str(rows)}
    tables["data"] = {"clients": clients, "augment": []}
    e = Experiment.from_dict(tables)
    config = written(tmp_path, e)
    text = (tmp_path / "app/pyproject.toml").read_text()
    assert str(tmp_path) not in text
    assert socket.gethostname() not in text
    assert "\\n" not in text
    assert "\nmethod.rounds = " in text.split("# What it leaves")[0]
    assert config["out"] == "runs"
    moved = tmp_path / "elsewhere"
    (tmp_path / "app").rename(moved)
    found = run_config.with_paths(run_config.merge_settings(config | {"home": str(moved)}))
    assert found["data"]["clients"] == clients
    monkeypatch.chdir(moved)  # as a SuperLink that was started here
    assert run_config.with_paths(run_config.merge_settings(config))["data"]["clients"] == clients
    assert run_config.run_folder(config, 7) == moved / "runs/run-7"
    assert run_config.run_folder(config | {"run-name": "trial", "out": str(tmp_path)}, 7) == tmp_path / "trial"


@pytest.mark.parametrize("before", ["", "secret.key", "secret.key\n", "runs/\n"])
def test_an_app_in_a_folder_of_the_user_keeps_what_git_and_flower_must_ignore(before, tmp_path):
    (tmp_path / ".gitignore").write_text(before)
    app_writer.write(tmp_path)
    assert (tmp_path / ".gitignore").read_text().split() == sorted({*before.split(), "runs/"}, reverse=True)
    assert (tmp_path / "pyproject.toml").exists()


def test_flwr_run_changes_settings(tmp_path):
    config = written(tmp_path, Experiment.from_dict(experiment_of("fedavg", tmp_path)))
    told = tomllib.loads(
        changed(config, 'method.rounds=7 run.seed=3 set="run.min_clients=2; data.limit=50"')["experiment"]
    )
    assert (told["method"]["rounds"], told["run"]["seed"]) == (7, 3)
    assert (told["run"]["min_clients"], told["data"]["limit"]) == (2, 50)
    assert Experiment.from_dict(told).method.rounds == 7
    assert changed(config, 'run-name="trial-1"')["run-name"] == "trial-1"
    with pytest.raises(ValueError, match=r"method\.turns"):
        changed(config, "method.turns=7")
    for text in ("run.engine=1", "run.workers=4"):
        with pytest.raises(ValueError, match="run"):
            changed(config, text)


def test_settings_of_the_server_alone_are_not_sent_to_the_sites(tmp_path):
    tables = experiment_of("fedbaf", tmp_path)
    config = written(tmp_path, Experiment.from_dict(tables))
    assert tables["method"]["foundation"] not in str(config)
    assert "method.foundation" not in config
    assert WITHHELD in config["experiment"]
    assert Experiment.from_dict(
        tomllib.loads(run_config.merge_settings(config)["experiment"])
    ).server_only().keys() == {key for key in FedBaF.__dataclass_fields__ if key == "foundation"}
    with pytest.raises(InputError, match=r"method\.foundation: only the server may have this value"):
        changed(config, 'set="method.foundation=/srv/model"')


NAMES = st.sampled_from(["rounds", "local", "epochs", "name", "speeds", "a b", "", "x.y"])
LEAVES = st.booleans() | st.integers(-9, 9) | st.floats(-1e9, 1e9) | st.text("a.=\n", max_size=3) | st.just([1, 2])
VALUES = LEAVES | st.dictionaries(NAMES, LEAVES, max_size=2)


@given(st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), max_size=3))
def test_splitting_and_merging_settings_are_inverse(tables):
    text = to_toml(tables)
    assert tomllib.loads(
        run_config.merge_settings(run_config.split_settings(text, frozenset()))["experiment"]
    ) == tomllib.loads(text)


@pytest.mark.parametrize(
    "config",
    [
        {"experiment": "x = [", "a.b": 1},
        {"experiment": "{ x = "},
        {"experiment": "{ x = 1 }\ny = 2"},
        {"experiment": "{ " + ".".join("a" * 40) + " = 1 }"},
        {"experiment": "", ".".join("a" * 40): 1},
        {"experiment": "a = 1", "a.b": 1},
        {"experiment": "", "set": "no value"},
        {"experiment": "", "set": "a.b=" + "[" * 5000},
        {"experiment": "", "set": "a.b=1; a.b.c=2"},
        {"experiment": "", "a.b": "x" * (1 << 20)},
        {"experiment": ".".join("a" * 40) + " = 1", "a.b": 1},
    ],
)
def test_a_hostile_servers_configuration_is_refused(config):
    with pytest.raises(InputError):
        run_config.merge_settings(config)


def test_a_process_for_one_message_imports_no_large_library():
    code = "import sys, fedfm.apps; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
