"""Spawned workers of the local engine: separate programs, each of which sees only certain GPUs.

A process that has opened a GPU must not fork, because its children could not use the GPU. So each worker is a program
of its own, :mod:`fedfm.engines.local.spawned_worker`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fedfm.models import cuda_devices

MOST = 1 << 12  # bytes: the limit of a worker's first message, which says whether the worker is ready, or why not


class Spawned(NamedTuple):
    """A started worker.

    Attributes:
        socket: our end of the socket pair. The worker's first message is a text. It is empty if the worker is ready;
            otherwise it gives the reason.
    """

    pid: int
    socket: socket.socket


def spawn(run: Path, visible: str) -> Spawned:
    """Start a worker that sees these GPUs."""
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
    worker.returncode = 0  # suppresses Python's warning; the pool waits for the process by its id
    return Spawned(worker.pid, ours)
