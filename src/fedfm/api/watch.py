"""``fedfm watch``: a page of this machine that shows a run while it runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedfm.engines.child_processes import is_locked
from fedfm.errors import InputError
from fedfm.reports.read import read
from fedfm.reports.watch_server import REFRESH, WatchServer
from fedfm.runtime.run_folder import LOCK

_POLL = 0.5  # seconds between two looks at the run
_LAST = 3.0 * REFRESH  # seconds for which the finished run's report is served to a browser that has not yet loaded it


def watch(path: Path, port: int, tell: Callable[[str], None]) -> bool:
    """Serve a run's report on 127.0.0.1 until the run ends, its process ends, or the user presses Ctrl-C.

    Nothing in the run directory is changed.

    Args:
        port: 0 for a free port.
        tell: called with the page's address.

    Returns:
        Whether the run has finished.

    Raises:
        InputError: the folder has no run, no process is running it, or the port is in use.
    """
    path = path.resolve()
    if _is_finished(path):
        raise InputError(f"{path}: the run has finished; `fedfm report {path}` writes its report")
    if not is_running(path):
        raise InputError(f"{path}: no process of this machine is running it; `fedfm resume {path}` continues it")
    with WatchServer(path, port) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        tell(server.url)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                while is_running(path):
                    time.sleep(_POLL)
                end = time.monotonic() + _LAST
                while _is_finished(path) and time.monotonic() < end:
                    if server.showed_end:
                        break
                    time.sleep(_POLL)
        finally:
            server.shutdown()
    return _is_finished(path)


def is_running(path: Path) -> bool:
    """Whether a process of this machine is running the run."""
    return is_locked(path / "private" / LOCK)


def _is_finished(path: Path) -> bool:
    return read(path, messages=False).is_finished
