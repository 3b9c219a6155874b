"""Refusals of wrong input by the command line: rules for all commands, and refusals before long computations."""

import argparse
import ast
import json
import re
import socket
import tomllib
from pathlib import Path

import pytest

import fedfm
from fedfm.cli import main
from fedfm.cli.parser import build
from fedfm.config import catalogue
from fedfm.core import tasks
from fedfm.errors import InputError, reason_of
from fedfm.reports.watch_server import WatchServer

SOURCE = Path(fedfm.__file__).parent
OF_SYSTEM = {"OSError", "FileNotFoundError", "IsADirectoryError", "NotADirectoryError", "PermissionError"}


def test_no_message_shows_the_number_of_a_systems_error():
    """An error of the system is put into words by ``reason_of``: its own text begins with [Errno N]."""
    found = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if not re.search(r"except .* as (\w+):.*\{\1\}", text, re.S):  # to parse all files would take seconds
            continue
        for handler in ast.walk(ast.parse(text)):
            if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
                caught = {ast.unparse(one) for one in getattr(handler.type, "elts", [handler.type])}
                shown = [node.value for node in ast.walk(handler) if isinstance(node, ast.FormattedValue)]
                plain = any(isinstance(value, ast.Name) and value.id == handler.name for value in shown)
                if plain and caught & OF_SYSTEM:
                    found.append(f"{path.relative_to(SOURCE)}:{handler.lineno}")
    assert not found


def test_reasons_of_system_errors_are_words(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\x8f")
    for read in (tmp_path.read_bytes, (tmp_path / "none").read_text, (tmp_path / "bytes").read_text):
        with pytest.raises((OSError, ValueError)) as caught:
            read()
        assert reason_of(caught.value).isascii()
        assert not {"Errno", "codec", "position"} & set(reason_of(caught.value).replace("[", " ").split())
    with pytest.raises(ValueError, match="Expecting") as caught:
        json.loads("{")
    assert reason_of(caught.value).startswith("it is not JSON: ")


def commands():
    """The parser of each command by its name."""
    (found,) = (one for one in build()._actions if isinstance(one, argparse._SubParsersAction))
    return found.choices


def test_every_command_names_the_nearest_command_option_and_choice(capsys):
    for name, parser in commands().items():
        assert refusal([f"{name}x"], capsys).count("did you mean") == 1
        needed = [one for one in parser._actions if not one.option_strings and one.nargs not in ("?", "*")]
        words = [str(next(iter(one.choices or ["x"]))) for one in needed]
        for one in parser._actions:
            words += (
                [one.option_strings[-1], str(next(iter(one.choices or ["1"])))]
                if one.required and one.option_strings
                else []
            )
        said = refusal([name, *words, "--hepl"], capsys)
        assert f"fedfm {name}: error: unrecognized arguments: --hepl (did you mean" in said
        assert said.startswith(f"usage: fedfm {name} ")
        for one in parser._actions:
            if one.option_strings and one.choices:
                choice = str(next(iter(one.choices)))
                assert f'(did you mean "{choice}"?)' in refusal(
                    [name, *words, one.option_strings[-1], f"{choice}x"], capsys
                )


def refusal(words, capsys):
    """What a command says of wrong arguments."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_show_prints_every_task_with_all_its_own_keys():
    for name in tasks.names():
        text, task = catalogue.show(name), tasks.find(name)
        assert tomllib.loads(text)["model"]["task"] == name
        assert all(f"{column.key} = " in text for column in task.columns)
        assert all(f"{key} = " in text for key, _, _ in catalogue.settings_of(type(task)))


def test_show_states_the_kind_of_a_name_without_keys():
    for name, kind in (("dirichlet", "partitions"), ("nano-vit", "models"), ("npz", "sources")):
        with pytest.raises(InputError, match=f'"{name}" is one of the {kind}'):
            catalogue.show(name)
    with pytest.raises(InputError, match='did you mean "regression"'):
        catalogue.show("regressio")


def test_a_port_that_watch_cannot_have_is_refused_in_words(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        for port in (other.getsockname()[1], 65_536, -1):
            with pytest.raises(InputError, match=rf"^--port {port}: [^\[]*; leave it out for a free port$"):
                WatchServer(tmp_path, port)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "run"], "run is the directory of a run, which `fedfm resume run` continues"),
        (["app", "exp.toml"], "`fedfm app FOLDER --experiment exp.toml`"),
        (["verify", "nothing"], "nothing: there is no such folder"),
        (["silo", "."], "expected a silo's file"),
        (["silo", "bytes.toml"], "not TOML: it is not text in UTF-8"),
        (["start", "exp.toml"], "there is no kit"),
        (["advise", "exp.toml", "--seconds", "nan"], "--seconds nan: expected a number above 0"),
    ],
)
def test_wrong_input_is_refused_with_the_way_out(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/manifest.json").write_text("{}")
    Path("bytes.toml").write_bytes(b"\x8f")
    table = '[data]\nname = "digits"\n[model]\nname = "nano-vit"\nadaptation.name = "head"\n[method]\nname = "fedavg"\n'
    Path("exp.toml").write_text(table)
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
