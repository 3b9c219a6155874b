"""The program of a spawned worker.

``python -m fedfm.engines.local.spawned_worker FD RUN`` reads rows and model of the run directory ``RUN`` and answers on
the socket ``FD`` like a forked worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from fedfm.engines.child_processes import die_with
from fedfm.engines.local.engine import silos_of
from fedfm.engines.local.spawned import MOST
from fedfm.engines.local.worker_pool import work
from fedfm.linalg.kernels import buffers
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run


def serve(link: socket.socket, run: Path) -> None:
    """Load rows and model, report that to the pool, and answer until the socket closes."""
    with torch_threads(1):
        try:
            known = Run.open(run)
            model = known.experiment.model
            # In the parent this GPU is e.g. "cuda:3"; here it is the only visible one.
            here = replace(model, device=model.device.partition(":")[0])
            silos = silos_of(known, populate(replace(known.experiment, model=here)))
        except Exception as error:
            link.send(json.dumps(f"{type(error).__name__}: {error}"[: MOST // 8]).encode())
            return
        link.send(json.dumps("").encode())
        work(silos, link)


def main() -> None:
    """Run the worker with the arguments ``FD RUN``."""
    die_with(int(os.environ["FEDFM_SPAWNED_BY"]))
    for number in (signal.SIGINT, signal.SIGHUP):  # the server decides
        signal.signal(number, signal.SIG_IGN)
    buffers.keep_freed()
    serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
