"""A command whose output cannot be written whole leaves the file that was there, or nothing."""

import errno
import io
import os
from pathlib import Path

import pytest

import fedfm
from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.core import storage
from fedfm.errors import RunError
from small import experiment


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failed")
    tables = experiment(folder) | {"run": {"workers": 1}}
    (folder / "exp.toml").write_text(to_toml(tables))
    fedfm.run(tables, folder / "run", progress=fedfm.Progress())
    return folder


def fail_below(folder, monkeypatch, allowed):
    """Let the disk be full after so many files were opened below the folder."""
    opened, real = [], io.open

    def full(file, mode="r", *args, **kwargs):
        found = real(file, mode, *args, **kwargs)
        if isinstance(file, str | os.PathLike) and folder in Path(file).absolute().parents and set(mode) & {*"wxa"}:
            opened.append(file)
            if len(opened) > allowed:
                found.close()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return found

    monkeypatch.setattr("builtins.open", full)
    monkeypatch.setattr(io, "open", full)
    return opened


COMMANDS = {
    "schema": (["schema", "--out"], "out.json"),
    "compare": (["compare", "run", "--out"], "out.html"),
    "app": (["app", "--experiment", "exp.toml"], "out"),
    "export": (["export", "run", "--to", "torch", "--out"], "out"),
    "advise": (["advise", "exp.toml", "--seconds", "0.1", "--out"], "out"),
}


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_leaves_no_half_of_an_output(name, allowed, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(place)
    words, out = COMMANDS[name]
    out = tmp_path / out
    opened = fail_below(tmp_path, monkeypatch, allowed)
    code = main([*words, str(out)])
    monkeypatch.undo()
    if len(opened) <= allowed:
        pytest.skip("the command writes fewer files")
    assert code == 1
    assert "the disk is full" in capsys.readouterr().err
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".gitignore"]
    assert left == []


@pytest.mark.parametrize("name", ["schema", "compare"])
def test_a_full_disk_keeps_the_old_file(name, place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    words, out = COMMANDS[name]
    out = tmp_path / out
    assert main([*words, str(out)]) == 0
    before = out.read_bytes()
    fail_below(tmp_path, monkeypatch, 0)
    assert main([*words, str(out)]) == 1
    monkeypatch.undo()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {out: before}


def test_only_a_failed_write_in_a_run_names_what_the_run_keeps(tmp_path, monkeypatch):
    fail_below(tmp_path, monkeypatch, 0)
    for of_run in (True, False):
        with pytest.raises(RunError, match="the disk is full") as failed:
            storage.write_atomic(tmp_path / "x", b"x", of_run=of_run)
        assert ("what was committed" in str(failed.value)) is of_run
