"""Spawned workers of the local engine: separate programs, each with its visible GPUs.

A process that has opened a GPU cannot fork: its children cannot use it. So each worker is started as
:mod:`fedfm.engines.local.spawned_worker`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fedfm.models import cuda_devices

MOST = 1 << 12  # bytes of a worker's first message, which says that it is ready or why not


class Spawned(NamedTuple):
    """A started worker.

    Attributes:
        socket: our end of the socket pair. The first message is a text: empty if the worker is ready, else the reason
            why it is not.
    """

    pid: int
    socket: socket.socket


def spawn(run: Path, visible: str) -> Spawned:
    """Start a worker with these visible GPUs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "fedfm.engines.local.spawned_worker", str(theirs.fileno()), str(run.resolve())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {
                cuda_devices.VISIBLE: visible,
                "FEDFM_SPAWNED_BY": str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )
    worker.returncode = 0  # the pool waits for the process by its id
    return Spawned(worker.pid, ours)
