"""Programs as forks of one process: they are started, reported and ended as programs of their own."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fedfm.engines.child_processes import Children
from fedfm.engines.flower.program_forks import NAME, Forks
from fedfm.engines.flower.quiet_time import QuietTime
from fedfm.errors import RunError

PROGRAMS = """
import os, sys, time
from fedfm.engines.flower.program_forks import serve

def brief():
    print(sys.argv, os.environ["COLOUR"], repr(sys.stdin.read()))
    raise SystemExit(int(sys.argv[1]))

def fails():
    raise ValueError("a defect")

def sleeps():
    print("up", flush=True)
    time.sleep(600)

serve({"brief": brief, "fails": fails, "sleeps": sleeps})
"""


@pytest.fixture
def forks(tmp_path):
    children = Children(tmp_path / "logs", os.environ | {"COLOUR": "red"})
    forks = Forks(children, [sys.executable, "-c", PROGRAMS])
    yield children, forks
    children.end()
    forks.close()


def ended(children, count):
    found, end = [], time.monotonic() + 60
    while len(found) < count:
        found += children.reap()
        assert time.monotonic() < end
    return sorted(found)


def up(children, name):
    end = time.monotonic() + 60
    while "up" not in children.tail(name):
        assert time.monotonic() < end
        time.sleep(0.02)
    return children.pids()[name]


def lives(pid):
    """Whether a process has not ended; it may wait for its parent to take note."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_each_has_its_arguments_environment_log_and_end(forks):
    children, forks = forks
    forks.start("one", ["brief", "3"])
    forks.start("other", ["brief", "0"], {"COLOUR": "blue"})
    forks.start("broken", ["fails"])
    assert ended(children, 3) == [
        ("broken", "exit status 1"),
        ("one", "exit status 3"),
        ("other", "exit status 0"),
    ]
    assert children.tail("one") == "['brief', '3'] red ''"
    assert children.tail("other") == "['brief', '0'] blue ''"
    assert children.tail("broken").endswith("ValueError: a defect")
    assert children.pids().keys() == {NAME}
    assert children.log("one").stat().st_mode & 0o077 == 0


def test_a_killed_fork_is_named_and_all_forks_end_together(forks):
    children, forks = forks
    for name in ("one", "other"):
        forks.start(name, ["sleeps"])
    one, other = up(children, "one"), up(children, "other")
    assert os.getpgid(one) == one
    os.killpg(one, signal.SIGKILL)
    assert ended(children, 1) == [("one", "signal 9")]
    assert lives(other)
    children.end()
    assert not lives(other)


@pytest.mark.skipif(sys.platform != "linux", reason="the system ties a process to its parent on Linux only")
def test_all_end_with_the_process_that_forked_and_no_further_one_starts(forks):
    children, forks = forks
    forks.start("one", ["sleeps"])
    pid = up(children, "one")
    os.kill(children.pids()[NAME], signal.SIGKILL)
    assert ended(children, 2) == [(NAME, "signal 9"), ("one", "signal 9")]
    until = time.monotonic() + 60
    while lives(pid):
        assert time.monotonic() < until
    with pytest.raises(RunError, match="late did not start"):
        forks.start("late", ["sleeps"])


def test_a_process_that_cannot_import_says_so(tmp_path):
    children = Children(tmp_path / "logs", os.environ)
    forks = Forks(children, [sys.executable, "-c", "import no_such_library"])
    with pytest.raises(RunError, match=r"(?s)superlink did not start.*No module named 'no_such_library'"):
        forks.start("superlink", ["sleeps"])
    children.end()
    forks.close()


def test_a_message_waits_at_most_a_twentieth_longer_than_the_silence_before_it(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    silence, pauses = QuietTime(), []
    for seconds in (0.0, 3.0, 10.0, 19.0, 600.0):
        clock[0] = 100.0 + seconds
        pauses.append(silence.pause(0.2))
    assert pauses == pytest.approx([0.2, 0.2, 0.5, 0.95, 1.0])
    silence.end()
    assert silence.pause(0.2) == 0.2
    assert silence.pause(3.0) == 3.0  # as slow as its program asks for
