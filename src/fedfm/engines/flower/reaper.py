"""Ends what a simulation has started when the process that started it was killed: Ray's own would stay for minutes.

``python -m fedfm.engines.flower.reaper FOLDER``: everything to be ended has FOLDER in its environment. Standard input
ends with the process that wrote to it; a byte on it says that nothing is left to do.
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

_PATIENCE = 10.0  # seconds in which a process that is being started shows itself


@contextlib.contextmanager
def reaping(folder: str) -> Iterator[None]:
    """While this runs, processes with ``folder`` in their environment do not outlive this one; nor does the folder."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "fedfm.engines.flower.reaper", folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what kills our group leaves it alone
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            reaper.communicate(b".")


def marked(text: str) -> list[int]:
    """Processes of this user, but for this one, that were started with the text in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if text.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def end_all(folder: str) -> None:
    """End what was started with ``folder`` in its environment; then nobody writes into it, and it goes too."""
    deadline = time.monotonic() + _PATIENCE
    while (left := marked(folder)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait, then end them."""
    folder = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read(1):
        end_all(folder)


if __name__ == "__main__":
    main()
