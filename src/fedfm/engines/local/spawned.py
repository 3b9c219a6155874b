"""Spawned workers of the local engine: programs of their own, each with the GPUs that it sees.

A process that has opened a GPU cannot fork: its children cannot use it. ``python -m fedfm.engines.local.spawned FD
RUN`` reads rows and model of the run directory ``RUN`` and answers on the socket ``FD`` as a forked worker does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fedfm.engines.child_processes import die_with
from fedfm.models import devices

MOST = 1 << 12  # bytes of the message that a worker is ready, or why not


class Spawned(NamedTuple):
    """A started worker.

    Attributes:
        socket: our end; its first message is a text: empty once the worker is ready, else why it is not.
    """

    pid: int
    socket: socket.socket


def spawn(run: Path, visible: str) -> Spawned:
    """Start a worker that sees these GPUs."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        worker = subprocess.Popen(
            [sys.executable, "-m", "fedfm.engines.local.spawned", str(theirs.fileno()), str(run.resolve())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ
            | {
                devices.VISIBLE: visible,
                "FEDFM_SPAWNED_BY": str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
        )
    worker.returncode = 0  # the pool waits for the process by its id
    return Spawned(worker.pid, ours)


def serve(link: socket.socket, run: Path, work: Callable[..., None]) -> None:
    """Load, say so, and work until the socket closes."""
    from fedfm.engines.local.engine import silos_of
    from fedfm.linalg.threads import torch_threads
    from fedfm.runtime.population import populate
    from fedfm.runtime.run_directory import Run

    with torch_threads(1):
        try:
            known = Run.open(run)
            model = known.experiment.model
            # "cuda:3" is the parent's name for the only GPU that this process sees.
            here = replace(model, device=model.device.partition(":")[0])
            silos = silos_of(known, populate(replace(known.experiment, model=here)))
        except Exception as error:
            link.send(json.dumps(f"{type(error).__name__}: {error}"[: MOST // 8]).encode())
            return
        link.send(json.dumps("").encode())
        work(silos, link)


def main() -> None:
    """``python -m fedfm.engines.local.spawned FD RUN``."""
    import signal

    from fedfm.engines.local.worker_pool import work
    from fedfm.linalg.kernels import buffers

    die_with(int(os.environ["FEDFM_SPAWNED_BY"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    buffers.keep_freed()
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), work)


if __name__ == "__main__":
    main()
