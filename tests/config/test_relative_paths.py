"""Paths in an experiment's file are relative to it, else to the working directory, and never silently either."""

import re

import numpy as np
import pytest

from fedfm.cli import main
from fedfm.config.experiment import Experiment
from fedfm.errors import InputError

TEXT = '[data]\n{data}\n[model]\nname = "{model}"\n[method]\nname = "fedavg"\nrounds = 1\n'


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A folder with an experiment and rows; the working directory is another one."""
    for name in ("study", "elsewhere"):
        (tmp_path / name).mkdir()
    np.savez(tmp_path / "study/rows.npz", x=np.ones((4, 2), np.float32), y=np.arange(4) % 2)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "study"


def written(study, data='path = "rows.npz"', model="features"):
    (study / "exp.toml").write_text(TEXT.format(data=data, model=model))
    return study / "exp.toml"


def test_a_path_is_found_next_to_the_file(study):
    assert Experiment.load(written(study)).data.path == str(study / "rows.npz")
    clients = 'clients = { a = "rows.npz", b = "more.npz" }'
    assert Experiment.load(written(study, clients)).data.clients == {"a": str(study / "rows.npz"), "b": "more.npz"}
    (study / "net").mkdir()
    assert Experiment.load(written(study, model="net")).model.name == str(study / "net")


def test_a_path_absent_next_to_the_file_is_relative_to_the_working_directory(study):
    assert Experiment.load(written(study, 'path = "other.npz"')).data.path == "other.npz"
    (study.parent / "elsewhere/rows.npz").write_bytes(b"")
    (study / "rows.npz").unlink()
    assert Experiment.load(written(study)).data.path == "rows.npz"


@pytest.mark.parametrize("how", ["check", "run"])
def test_a_missing_file_is_looked_for_next_to_the_experiment(study, capsys, how):
    """The message lists the folder of the experiment's file, with what is near, and not the working directory."""
    (study.parent / "elsewhere/notes.txt").write_text("")
    (study / "more").mkdir()
    (study / "more/north.npz").write_bytes(b"")
    for data, said in (
        (
            'path = "row.npz"',
            f'there is no "row.npz", relative to .*; "{study}" holds .*"rows.npz".*did you mean "rows.npz"',
        ),
        ('clients = { a = "more/nord.npz" }', f'data.clients.a: .*"{study}/more" holds "north.npz".*mean "north.npz"'),
    ):
        assert main([how, str(written(study, data))]) == 2
        error = capsys.readouterr().err
        assert re.search(said, error)
        assert "notes.txt" not in error
    # A path of the command line is relative to the working directory.
    assert main([how, str(written(study)), "--set", 'data.path="none.npz"']) == 2
    assert '"." holds "notes.txt"' in capsys.readouterr().err


def test_two_files_of_that_name_are_refused(study):
    (study.parent / "elsewhere/rows.npz").write_bytes(b"")
    with pytest.raises(
        InputError, match=r'data.path = "rows.npz": there is .*study/rows.npz, and .*elsewhere/rows.npz'
    ):
        Experiment.load(written(study))
    assert Experiment.load(written(study), {"data.path": "rows.npz"}).data.path == "rows.npz"  # of the command line


def test_a_built_in_model_is_no_folder(study):
    (study / "nano-vit").mkdir()
    assert Experiment.load(written(study, model="nano-vit")).model.name == "nano-vit"


def test_the_servers_key_is_made_next_to_the_file(study):
    """The other paths of [run] have to be there; the folder is found next to the file, too."""
    (study / "disk").mkdir()
    keys = '[run]\nengine = "folder"\nfolder = "disk"\nroster = "roster.toml"\nidentity = "server.key"\n'
    path = written(study)
    path.write_text(path.read_text() + keys)
    run = Experiment.load(path).run
    assert (run.folder, run.identity) == (str(study / "disk"), str(study / "server.key"))
    assert run.roster == "roster.toml"
    (study.parent / "elsewhere/server.key").write_text("")
    assert Experiment.load(path).run.identity == "server.key"
