"""End a simulation's processes if the process that started them is killed; otherwise Ray's would stay for minutes.

``python -m fedfm.engines.flower.orphan_cleanup FOLDER`` ends all processes that have FOLDER in their environment. It
waits on standard input: a byte means that nothing is left to do, its end means that the starting process was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PATIENCE = 10.0  # seconds in which a process that has just started appears in the list of processes


@contextlib.contextmanager
def reaping(folder: str) -> Iterator[None]:
    """Context manager: the folder and processes with ``folder`` in their environment end with this process."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "fedfm.engines.flower.orphan_cleanup", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # signals to our group do not reach it
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            reaper.communicate(b".")


def processes_with(text: str) -> list[int]:
    """Other processes of this user that have the text in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it belongs to another user, or has ended
            if text.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def end_all(folder: str) -> None:
    """End processes with ``folder`` in their environment, and then remove the folder."""
    deadline = time.monotonic() + _PATIENCE
    while (left := processes_with(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the end of standard input, then end the processes."""
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read(1):
        end_all(folder)


if __name__ == "__main__":
    main()
