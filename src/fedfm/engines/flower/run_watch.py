"""End a silo's workers after their run, since each has a model and rows in memory.

A SuperLink does not notify its nodes when a run ends, so the silo asks. A busy worker first finishes its reply, which
is still of use if the run is submitted again. The next message starts a new worker.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedfm.engines.flower import client_stub

_PAUSE = 10.0  # seconds between two checks
AWAY = 120.0  # workers end if the server was unreachable for this many seconds


class RunWatch:
    """Watches the workers of a silo, in a thread of its own.

    Args:
        runs: the folder of all runs at the silo.
        over: returns whether a run has ended, given the ids of node and run; None if this is unknown.
        clear: returns whether the server can be reached.
        tell: called with a line when a worker ends.
    """

    def __init__(
        self,
        runs: Path,
        over: Callable[[int, int], bool | None],
        clear: Callable[[], bool],
        tell: Callable[[str], None],
    ) -> None:
        self._runs, self._over, self._clear, self._tell = runs, over, clear, tell
        self._seen = time.monotonic()
        self._asked: dict[Path, str] = {}  # workers that were asked to end but may still be busy
        self._end = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._watch, daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(_PAUSE):
            self.look()

    def look(self) -> None:
        """Ask workers that are no longer needed to end."""
        now = time.monotonic()
        if self._clear():
            self._seen = now
        for lock in sorted(self._runs.glob("*/*/worker.lock")):
            folder = lock.parent
            if not client_stub.running(folder):
                self._asked.pop(folder, None)
                continue
            why = self._needless(folder, now)
            worker = f"{lock.read_text()} {client_stub.flower_run(folder)}"
            if why and self._asked.get(folder) != worker:
                self._asked[folder] = worker
                client_stub.release(folder)
                self._tell(f"run {folder.parent.name}: its worker ends, {why}")

    def _needless(self, folder: Path, now: float) -> str:
        """Why a worker is no longer needed; "" if it may be needed."""
        if now - self._seen > AWAY:
            return f"since the server has not been reachable for {AWAY:g} s"
        known = client_stub.flower_run(folder)
        return "since the run has ended" if known and now == self._seen and self._over(*known) else ""
