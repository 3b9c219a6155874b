"""Signals stop every command: it leaves no temporary files, which may hold keys or updates, and says which signal."""

from __future__ import annotations

import os
import pty
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedfm
from fedfm.cli import main
from fedfm.config.toml import to_toml
from fedfm.errors import Terminated
from small import experiment

STOPS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
COMMANDS = {
    "audit": ["audit", "run", "--attack", "canaries"],
    "advise": ["advise", "exp.toml", "--seconds", "1"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sigterm")
    tables = experiment(folder, method={"rounds": 1, "fraction": 1.0}) | {"run": {"workers": 1}}
    (folder / "exp.toml").write_text(to_toml(tables))
    tables["privacy"] = {"unit": "client", "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5}
    fedfm.run(tables, folder / "run", progress=fedfm.Progress())
    return folder


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Every test leaves the handlers of this process as they were. A shell may have started it with signals ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    outside = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    after = {number: signal.signal(number, outside[number]) for number in STOPS}
    assert after == usual


def stop_when(number: signal.Signals, argv: list[str], place: Path, times: int = 1) -> int:
    """Run a command in a fork, and send it a signal whenever it uses a file below a folder; return its exit code."""
    pid = os.fork()
    if not pid:
        sent: list[None] = []

        def terminate(what: str, args: tuple[object, ...]) -> None:
            if (
                what in ("open", "os.mkdir", "os.rename", "os.remove")
                and len(sent) < times
                and place in Path(str(args[0])).parents
            ):
                sent.append(os.kill(os.getpid(), number))

        sys.addaudithook(terminate)
        os._exit(main(argv))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", STOPS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_stopped_removes_its_temporary_files(name, number, run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(run)
    for times in (1, 9):  # somebody who presses Ctrl-C again must not stop the cleaning
        assert stop_when(number, COMMANDS[name], tmp_path, times) == STOPS[number]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", STOPS)
def test_a_run_that_is_stopped_says_how_to_continue_and_by_which_signal(number, run, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(run)
    out = tmp_path / "out"
    assert stop_when(number, ["run", "exp.toml", "--out", str(out)], out / "checkpoint") == STOPS[number]
    said = capfd.readouterr().err
    assert f"continue with: fedfm resume {out}" in said
    assert "Traceback" not in said
    assert main(["resume", str(out)]) == 0


def test_a_second_signal_determines_the_exit_code(run, tmp_path, monkeypatch):
    class Twice(fedfm.Progress):
        def round(self, line):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(run)
    with pytest.raises(Terminated) as stopped:
        fedfm.run("exp.toml", tmp_path / "out", progress=Twice())
    assert stopped.value.number == signal.SIGTERM


def test_a_program_that_calls_a_command_keeps_its_own_handlers():
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        assert main(["show", "no-such-method"]) == 2
        with pytest.raises(SystemExit):
            main(["--version"])
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_a_signal_that_the_caller_ignores_stays_ignored(run, tmp_path, monkeypatch):
    """As under nohup: the run ends although its terminal has been closed."""
    monkeypatch.chdir(run)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        out = tmp_path / "out"
        assert stop_when(signal.SIGHUP, ["run", "exp.toml", "--out", str(out)], out / "checkpoint") == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_runs_in_a_thread_without_handlers():
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(main(["show", "no-such-method"])))
    thread.start()
    thread.join()
    assert found == [2]


@pytest.mark.parametrize("closed", [["stderr"], ["stdout", "stderr"], ["stdin", "stdout", "stderr"]])
def test_a_process_without_standard_streams_runs(closed, run, tmp_path, monkeypatch):
    """As of a job whose starter has closed them: Python then has None in their places."""
    monkeypatch.chdir(run)
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    assert main(["run", "exp.toml", "--out", str(tmp_path / "out"), "--format", "json"]) == 0
    for name in closed:
        getattr(sys, name).close()


@pytest.mark.proof
def test_a_closed_terminal_ends_a_run_with_its_own_exit_code(run, tmp_path):
    pid, terminal = pty.fork()
    if not pid:
        line = ["run", str(run / "exp.toml"), "--out", str(tmp_path / "out"), "--set", "method.rounds=100000"]
        os.execv(sys.executable, [sys.executable, "-m", "fedfm", *line])
    deadline = time.monotonic() + 120
    while not (tmp_path / "out/metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == STOPS[signal.SIGHUP]
    assert main(["report", str(tmp_path / "out")]) == 0
