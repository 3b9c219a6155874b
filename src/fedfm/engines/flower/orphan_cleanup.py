"""End a simulation's processes if the process that started them is killed; Ray's own cleanup would take minutes.

``python -m fedfm.engines.flower.orphan_cleanup FOLDER`` ends all processes whose environment contains FOLDER. It first
waits on standard input. A byte means that nothing is left to end. The end of the input means that the starting process
was killed.
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

_PATIENCE = 10.0  # a new process appears in the list of processes within this many seconds


@contextlib.contextmanager
def reaping(folder: str) -> Iterator[None]:
    """Context manager: if this process is killed, remove the folder and end the processes that ``folder``
    identifies.
    """
    reaper = subprocess.Popen(
        [sys.executable, "-m", "fedfm.engines.flower.orphan_cleanup", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # it must not get the signals that this process group gets
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            reaper.communicate(b".")


def processes_with(text: str) -> list[int]:
    """Ids of other processes of this user whose environment contains ``text``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process belongs to another user, or has ended
            if text.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def end_all(folder: str) -> None:
    """End all processes whose environment contains ``folder``; then remove the folder."""
    deadline = time.monotonic() + _PATIENCE
    while (left := processes_with(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait until standard input ends, then end the processes."""
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read(1):
        end_all(folder)


if __name__ == "__main__":
    main()
