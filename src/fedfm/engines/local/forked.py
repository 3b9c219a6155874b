"""Forked workers of the local engine, which share model and data with the server's process."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from weakref import WeakSet

from fedfm.engines.child_processes import die_with, run_and_exit
from fedfm.linalg.kernels import buffers

_ours: WeakSet[socket.socket] = WeakSet()  # server ends of all workers' sockets in this process


def fork(work: Callable[[socket.socket], None]) -> tuple[int, socket.socket]:
    """Fork a worker that runs ``work`` with its end of a socket pair; returns its process id and our end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()

    def body() -> None:
        ours.close()
        # Close these copies of the server's ends: otherwise other workers would not notice the end of the server.
        for inherited in list(_ours):
            inherited.close()
        die_with(parent)  # otherwise an orphan could write client memories during a resumed run
        buffers.keep_freed()
        for number in (signal.SIGINT, signal.SIGHUP):  # the server decides
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(theirs)

    if not (pid := os.fork()):
        run_and_exit(body)
    theirs.close()
    _ours.add(ours)
    return pid, ours
