"""A worker process of the owner's encrypted computation. It reads jobs from stdin and writes questions to stdout.

:mod:`~fedfm.encrypted.inference.worker_pool` starts the worker. The worker ends when its parent process ends.
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

import numpy as np

from fedfm.encrypted.inference import framing
from fedfm.encrypted.inference.model_owner import Checkpoint, ModelOwner
from fedfm.encrypted.inference.model_serialization import DecodedModel, model_of
from fedfm.encrypted.inference.permuted_model_owner import PermutedModelOwner, orders_of
from fedfm.encrypted.inference.released_states import Numbers
from fedfm.errors import ClientFault, FedfmError, RunError
from fedfm.linalg.kernels import buffers


class Questions:
    """Sends questions to the parent process, which communicates with clients, and waits for each answer.

    An object of this class is also the ledger of a job: it passes entries on to the parent process, which stores them.
    """

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target

    def ask(self, kind: int, *parts: bytes) -> bytes:
        """Ask a question, and return its answer.

        Raises:
            ClientFault: the client failed, so the job ends.
        """
        framing.write(self._target, kind, *parts)
        answer, found = framing.read(self._source)
        if answer == framing.FAULT:
            raise ClientFault(found[0].decode(), found[1].decode())
        return found[0]

    def spend(self, count: int, each: float) -> None:
        """Record a distance at the parent process; the method returns when the distance is stored."""
        self.ask(framing.SPEND, framing.SPENT.pack(count, each))


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Process jobs until the input ends."""
    link = Questions(source, target)
    model: DecodedModel | None = None
    projection: Numbers | None = None
    released = ""
    while True:
        try:
            kind, parts = framing.read(source)
        except EOFError:
            return
        try:
            if kind == framing.MODEL:
                model, released = model_of(parts[0]), parts[1].decode()
                projection = np.frombuffer(parts[2], "<f8").reshape(-1, model.positions.shape[1]) if parts[2] else None
                continue
            if kind != framing.JOB or model is None:
                raise RunError("a process of the encrypted computation got a frame of an unknown kind")
            public, session, key, rows, start, orders = parts
            owner: ModelOwner = (
                PermutedModelOwner(model, released, public, session, key, link, orders=orders_of(orders))
                if orders
                else ModelOwner(model, released, public, session, key, link, projection=projection)
            )
            owner.run(
                rows,
                lambda message: link.ask(framing.REFRESH, message),
                lambda block, message: link.ask(framing.RELEASE, str(block).encode(), message),
                Checkpoint.from_bytes(start) if start else None,
                lambda checkpoint: _unit(link.ask(framing.SAVE, checkpoint.to_bytes())),
            )
            framing.write(target, framing.DONE)
        except ClientFault as fault:
            framing.write(target, framing.FAILED, fault.code.encode(), fault.reason.encode())
        except EOFError:
            return
        except FedfmError as error:
            framing.write(target, framing.BROKEN, str(error).encode())


def _unit(answer: bytes) -> None:
    """Ignore an answer that only confirms a request."""


def main() -> None:
    """Process jobs from stdin. Only frames go to stdout; all other output goes to stderr."""
    buffers.keep_all_freed()
    try:
        with os.fdopen(os.dup(1), "wb") as target:
            os.dup2(2, 1)
            sys.stdout = sys.stderr
            serve(sys.stdin.buffer, target)
    except BrokenPipeError:  # the process that asked has ended, and nobody reads; closing `target` may find it, too
        return


if __name__ == "__main__":
    main()
