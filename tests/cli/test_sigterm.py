"""SIGTERM stops every command as Ctrl-C does: it leaves no temporary files, which may hold keys or updates."""

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

import fedfm
from fedfm.cli import main
from fedfm.cli.entry import INTERRUPTED
from fedfm.config.toml import to_toml
from small import experiment


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sigterm")
    tables = experiment(folder, method={"rounds": 1, "fraction": 1.0}) | {"run": {"workers": 1}}
    (folder / "exp.toml").write_text(to_toml(tables))
    tables["privacy"] = {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    fedfm.run(tables, folder / "run", progress=fedfm.Progress())
    return folder


COMMANDS = {
    "audit": ["audit", "run", "--attack", "canaries"],
    "advise": ["advise", "exp.toml", "--seconds", "1"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_terminated_removes_its_temporary_files(name, run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(run)
    pid = os.fork()
    if not pid:
        sent = []

        def terminate(event, args):
            if event in ("open", "os.mkdir") and tmp_path in Path(str(args[0])).parents[1:] and not sent:
                sent.append(os.kill(os.getpid(), signal.SIGTERM))

        sys.addaudithook(terminate)
        os._exit(main(COMMANDS[name]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == INTERRUPTED
    assert list(tmp_path.iterdir()) == []
