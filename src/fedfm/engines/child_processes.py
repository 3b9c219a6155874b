"""Start child processes that end with this process. Each program of a deployment leads a process group of its own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

_PR_SET_PDEATHSIG = 1
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL


class Program(Protocol):
    """What :class:`Children` uses of a ``Popen``."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class Children:
    """Starts programs, reports which of them have ended, and ends all of them.

    Args:
        logs: folder of the log files, one per program.
        environment: environment variables of every program.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self._logs, self._environment = logs, dict(environment)
        self._running: dict[str, Program] = {}
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        command: Sequence[str],
        more: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> int:
        """Start a program under a name; returns its process id, which is also the id of its process group.

        Args:
            more: further environment variables of this program.
            stdin: the program's standard input.
        """
        with open(os.open(self.log(name), os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-m", "fedfm.engines.child_processes", str(os.getpid()), *command],
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=self._environment | dict(more or {}),
                start_new_session=True,
            )
        return self._running[name].pid

    def adopt(self, name: str, program: Program) -> None:
        """Report and end a program that another process has started, which leads a process group of its own."""
        self._running[name] = program

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def tail(self, name: str, lines: int = 8) -> str:
        with contextlib.suppress(OSError):
            text = self.log(name).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return "\n".join(line[:300] for line in text[-lines:])
        return ""

    def reap(self) -> Iterator[tuple[str, str]]:
        """Yield (name, how it ended) for each program that has ended since the last call."""
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[name]
                _signal(process.pid, signal.SIGKILL)  # its remaining child processes
                yield name, f"signal {-code}" if code < 0 else f"exit status {code}"

    def stop(self, name: str) -> None:
        """End a program's group if the program runs; :meth:`reap` does not report this end."""
        if (process := self._running.pop(name, None)) is not None:
            _signal(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}

    def end(self) -> None:
        """End every group with SIGTERM, and after a grace period with SIGKILL."""
        groups = [process.pid for process in self._running.values()]
        for pid in groups:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))
        for pid in groups:
            _signal(pid, signal.SIGKILL)
        for process in self._running.values():
            process.wait()
        self._running.clear()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def die_with(parent: int) -> None:
    """Let the system end this process when the process ``parent`` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run_and_exit(body: Callable[[], None]) -> NoReturn:
    """Run ``body`` in a forked process, then end the process without the handlers that the parent registered.

    The traceback of an error goes to standard error: a bare ``os._exit`` would lose it.
    """
    status = 1
    try:
        body()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def cause(status: int) -> str:
    """Describe how a process ended, from its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = ", likely out of memory" if number == signal.SIGKILL else ""
        return f"signal {number} ({signal.Signals(number).name}{hint})"
    return f"exit status {os.waitstatus_to_exitcode(status)}"


def watch_parent() -> None:
    """End this process soon after the process with the id FEDFM_PARENT ends or becomes a zombie."""
    parent = int(os.environ.get("FEDFM_PARENT", "0"))

    def watch() -> None:
        while _lives(parent):
            time.sleep(0.5)
        os._exit(0)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except PermissionError:
        return True
    except OSError:
        return False


def is_locked(path: Path) -> bool:
    """Whether another process has this lock file locked; False if the file is absent."""
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def main() -> None:
    """Replace this process by a program that ends when its parent ends. Arguments: ``PARENT COMMAND...``.

    This is a program of its own, because running Python between fork and exec is unsafe if the parent has threads.
    """
    parent, command = int(sys.argv[1]), sys.argv[2:]
    os.umask(0o077)
    die_with(parent)
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
