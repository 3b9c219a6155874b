"""Run Flower's programs as forks of one process, which imports Flower once.

A program of Flower spends 1.4 s of a core and 90 MB on imports. A deployment on loopback has two programs for each
client and two for the server. The process that forks gets one request a line on its standard input, which is a socket,
and answers on the same socket with process ids, and later with wait statuses.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from fedfm.engines.child_processes import Children, die_with, run_and_exit
from fedfm.errors import RunError

NAME = "flower"  # name of the process that forks
_POLL = 0.05


class Forks:
    """The side of the process that starts the forks.

    Args:
        children: starts the process that forks, and gets every fork as one of its programs.
        command: the process that forks; it calls :func:`serve`.
    """

    def __init__(self, children: Children, command: Sequence[str]) -> None:
        self._children = children
        self._link, theirs = socket.socketpair()
        with theirs:
            self._forking = children.start(NAME, command, stdin=theirs.fileno())
        self._received = b""
        self._ended: dict[int, int] = {}  # exit codes by process id; minus the number of a signal

    def start(self, name: str, program: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        """Start a program: its name in :func:`serve`, and its arguments.

        Args:
            more: further environment variables of this program.

        Raises:
            RunError: the process that forks has ended; the message has the last lines of its log.
        """
        request = {"program": program, "environment": dict(more or {}), "log": str(self._children.log(name).resolve())}
        try:
            self._link.sendall(f"{json.dumps(request)}\n".encode())
            while (pid := self._read()) is None:
                pass
        except OSError:
            raise RunError(f"{name} did not start:\n{self._children.tail(NAME)}") from None
        self._children.adopt(name, Fork(self, pid))

    def code(self, pid: int) -> int | None:
        """How a fork ended, as ``Popen.returncode``; None while it runs."""
        try:
            while select.select([self._link], [], [], 0)[0]:
                self._read()
        except OSError:  # the forks have ended with the process that forked
            return self._ended.get(pid, -signal.SIGKILL)
        return self._ended.get(pid)

    def close(self) -> None:
        self._link.close()

    def _read(self) -> int | None:
        """Wait for answers, and take note of forks that have ended; the id of a fork that has started, if one has.

        Raises:
            OSError: the process that forks has ended.
        """
        if not (data := self._link.recv(1 << 16)):
            raise ConnectionResetError
        *lines, self._received = (self._received + data).split(b"\n")
        started = None
        for line in lines:
            pid, status = json.loads(line)
            if status is None:
                started = pid
                self._ended.pop(pid, None)  # of an earlier fork with this id
            else:
                self._ended[pid] = os.waitstatus_to_exitcode(status)
        return started


class Fork:
    """A program that is a fork, with what :class:`~fedfm.engines.child_processes.Children` uses of ``Popen``."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid

    def poll(self) -> int | None:
        return self._forks.code(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL)
        return code


def serve(programs: Mapping[str, Callable[[], None]]) -> NoReturn:
    """Fork for each request until standard input ends, or until SIGTERM and the end of all forks.

    Each fork leads a process group of its own, and ends with this process.
    """
    link, running, ends = socket.socket(fileno=os.dup(0)), set[int](), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    gc.freeze()  # collections would copy the memory that forks share
    with link, link.makefile("rw", encoding="utf-8") as lines:
        while running or not ends:
            if select.select([link], [], [], _POLL)[0]:
                if not (line := lines.readline()):
                    break
                request = json.loads(line)
                parent = os.getpid()
                if (pid := os.fork()) == 0:
                    os.close(link.detach())
                    _become(parent, request, programs)
                running.add(pid)
                print(json.dumps([pid, None]), file=lines, flush=True)
            while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
                running.discard(found[0])
                print(json.dumps(found), file=lines, flush=True)
    os._exit(0)


def _become(parent: int, request: Mapping[str, Any], programs: Mapping[str, Callable[[], None]]) -> NoReturn:
    """Run the program of a request in this fork, then end the fork."""

    def body() -> None:
        os.setsid()
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open(request["log"], os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        for there, here in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(there, here)
        os.environ.update(request["environment"])
        name, *arguments = request["program"]
        sys.argv = [name, *arguments]
        programs[name]()

    run_and_exit(body)
