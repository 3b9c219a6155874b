"""The owner's encrypted computation in several processes, since Python holds the GIL between compiled loops.

Each job, one batch of one client, runs in a process of its own (:mod:`~fedfm.encrypted.inference.worker`). Worker
processes are started as new programs, never forked, and exchange bytes with the parent process over pipes. Only the
parent communicates with clients, stores checkpoints, and records distances in ledgers. It sends refreshes of several
clients together, because on a network a message takes longer than the computation between two messages.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol, cast, runtime_checkable

import numpy as np

from fedfm.encrypted.ckks.refresh import Spending
from fedfm.encrypted.inference import framing
from fedfm.encrypted.inference.folded_model import FoldedModel
from fedfm.encrypted.inference.model_owner import Checkpoint
from fedfm.encrypted.inference.model_serialization import model_bytes
from fedfm.encrypted.inference.released_states import Numbers
from fedfm.errors import ClientFault, RunError

_WAIT = 10.0  # seconds within which a process has to end
_PATIENCE = 0.25  # longest time that a refresh waits for others, as a fraction of the last exchange's duration


@dataclass(frozen=True)
class EncryptedBatch:
    """One batch of one client, with its own session.

    Attributes:
        client, batch: the client's name and the batch's index.
        public: the client's evaluation keys.
        session: 16 bytes.
        key: 32 bytes, agreed on with the client.
        ledger: the client's ledger of statistical distance; only the parent process uses it.
        start: the checkpoint of an earlier session of the batch.
        orders: secret orders of the "permuted" protocol (see :mod:`~fedfm.encrypted.inference.permuted_model_owner`);
            otherwise b"".
    """

    client: str
    batch: int
    public: bytes = field(repr=False)
    session: bytes
    key: bytes = field(repr=False)
    ledger: Spending
    start: Checkpoint | None = field(default=None, repr=False)
    orders: bytes = field(default=b"", repr=False)


class Relay(Protocol):
    """The owner's communication with clients. A ``ClientFault`` ends the job, and any other exception ends all jobs."""

    def rows(self, job: EncryptedBatch) -> bytes:
        """Begin a session, and get encrypted rows from the client; if there is a checkpoint, the result may be b""."""

    def refresh(self, job: EncryptedBatch, message: bytes) -> bytes:
        """Send a refresh to the client, and return the client's answer."""

    def release(self, job: EncryptedBatch, block: int, message: bytes) -> bytes | None:
        """Send the disclosed activations of a block; return the client's answer if there is one."""

    def save(self, job: EncryptedBatch, checkpoint: bytes) -> None:
        """Store a serialised :class:`Checkpoint`, after its states were sent."""


@runtime_checkable
class Gathering(Relay, Protocol):
    """A relay that can ask several clients at once."""

    def refreshes(self, asked: Sequence[tuple[EncryptedBatch, bytes]]) -> list[bytes | ClientFault]:
        """Send several refreshes to their clients; return the answers in the order of the requests."""


class _BlockProcess:
    """A worker process and its current job."""

    def __init__(self) -> None:
        # The worker has its own session, so Ctrl-C reaches only the parent, which then ends the workers.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fedfm.encrypted.inference.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self.target, self.source = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)
        self.job: EncryptedBatch | None = None

    def write(self, kind: int, *parts: bytes) -> None:
        try:
            framing.write(self.target, kind, *parts)
        except BrokenPipeError:
            raise self.dead() from None

    def read(self) -> tuple[int, list[bytes]]:
        try:
            return framing.read(self.source)
        except EOFError:
            raise self.dead() from None

    def dead(self) -> RunError:
        """Make the error to raise when the process has ended."""
        try:
            code: int | None = self.process.wait(_WAIT)
        except subprocess.TimeoutExpired:
            code = None
        at = "" if self.job is None else f" at batch {self.job.batch} of client {self.job.client}"
        return RunError(
            f"a process of the encrypted computation ended{at} (exit code {code}; -9 usually means too little memory); "
            "resume the run, with fewer processes if memory is short"
        )

    def end(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.target, self.source):
            try:
                pipe.close()
            except OSError:
                continue  # the process has ended, so nothing reads the rest of the buffer


def run_all(
    jobs: Sequence[EncryptedBatch],
    relay: Relay,
    processes: int,
    *,
    folded: FoldedModel,
    released: str,
    projection: Numbers | None = None,
) -> dict[tuple[str, int], ClientFault]:
    """Run all jobs; return the faults of failed jobs by (client, batch).

    Args:
        processes: largest number of processes at the same time.
        folded, released, projection: as in :class:`~fedfm.encrypted.inference.model_owner.ModelOwner`.

    Raises:
        RunError: a process died or cannot continue.
    """
    left = list(jobs)
    failed: dict[tuple[str, int], ClientFault] = {}
    matrix = b"" if projection is None else np.ascontiguousarray(projection, "<f8").tobytes()
    model, workers = model_bytes(folded), []
    with selectors.DefaultSelector() as ready:
        try:
            for _ in range(min(max(processes, 1), len(left))):
                worker = _BlockProcess()
                workers.append(worker)
                worker.write(framing.MODEL, model, released.encode(), matrix)
                ready.register(worker.source, selectors.EVENT_READ, worker)
            for worker in workers:
                failed |= _next(worker, left, relay)
            waiting = _Waiting(relay)
            while any(worker.job for worker in workers):
                busy = sum(worker.job is not None for worker in workers) - len(waiting.asked)
                for found, _ in ready.select(waiting.patience(busy)):
                    worker = found.data
                    if not _answer(worker, waiting, failed):
                        failed |= _next(worker, left, relay)
                waiting.settle(len([w for w in workers if w.job]), failed)
        finally:
            for worker in workers:
                worker.end()
    return failed


def _next(worker: _BlockProcess, left: list[EncryptedBatch], relay: Relay) -> dict[tuple[str, int], ClientFault]:
    """Give a process the next job whose client answers; return the faults of the jobs whose clients do not answer."""
    failed: dict[tuple[str, int], ClientFault] = {}
    worker.job = None
    while left and worker.job is None:
        job = left.pop(0)
        try:
            rows = relay.rows(job)
        except ClientFault as fault:
            failed[job.client, job.batch] = fault
            continue
        start = b"" if job.start is None else job.start.to_bytes()
        worker.job = job
        worker.write(framing.JOB, job.public, job.session, job.key, rows, start, job.orders)
    return failed


class _Waiting:
    """Refreshes that wait for refreshes of other processes, so that all are sent together."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.asked: list[tuple[_BlockProcess, EncryptedBatch, bytes]] = []
        self._since = self._took = 0.0

    def add(self, worker: _BlockProcess, job: EncryptedBatch, message: bytes) -> None:
        """Add the refresh that a process asks for."""
        self._since = self._since if self.asked else time.monotonic()
        self.asked.append((worker, job, message))

    def patience(self, busy: int) -> float | None:
        """Return the seconds to wait for further refreshes while ``busy`` processes compute; None means no limit."""
        if not self.asked:
            return None
        return max(0.0, self._since + _PATIENCE * self._took - time.monotonic()) if busy else 0.0

    def settle(self, jobs: int, failed: dict[tuple[str, int], ClientFault]) -> None:
        """Exchange the refreshes if each process with a job (``jobs`` of them) has added one, or the wait is over."""
        if not self.asked or self.patience(jobs - len(self.asked)):
            return
        asked, self.asked, begun = self.asked, [], time.monotonic()
        pairs = [(job, message) for _, job, message in asked]
        if isinstance(self.relay, Gathering):
            answers = self.relay.refreshes(pairs)
        else:
            answers = [_try_refresh(self.relay, job, message) for job, message in pairs]
        self._took = time.monotonic() - begun
        for (worker, job, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, ClientFault):
                _fail(worker, job, answer, failed)
            else:
                worker.write(framing.ANSWER, answer)


def _try_refresh(relay: Relay, job: EncryptedBatch, message: bytes) -> bytes | ClientFault:
    try:
        return relay.refresh(job, message)
    except ClientFault as fault:
        return fault


def _fail(
    worker: _BlockProcess, job: EncryptedBatch, fault: ClientFault, failed: dict[tuple[str, int], ClientFault]
) -> None:
    failed[job.client, job.batch] = fault  # store the object itself: it may have further attributes
    worker.write(framing.FAULT, fault.code.encode(), fault.reason.encode())


def _answer(worker: _BlockProcess, waiting: _Waiting, failed: dict[tuple[str, int], ClientFault]) -> bool:
    """Answer one question of a process, or let the question wait; return False if the process's job has ended."""
    kind, parts = worker.read()
    job, relay = worker.job, waiting.relay
    if job is None or kind == framing.BROKEN:
        raise RunError(
            parts[0].decode() if parts else "a process of the encrypted computation sent an unexpected frame"
        )
    if kind in (framing.DONE, framing.FAILED):
        if kind == framing.FAILED:
            failed.setdefault((job.client, job.batch), ClientFault(parts[0].decode(), parts[1].decode()))
        return False
    if kind == framing.REFRESH:
        waiting.add(worker, job, parts[0])
        return True
    answer = b""
    try:
        if kind == framing.SPEND:
            job.ledger.spend(*framing.SPENT.unpack(parts[0]))
        elif kind == framing.RELEASE:
            answer = relay.release(job, int(parts[0]), parts[1]) or b""
        elif kind == framing.SAVE:
            relay.save(job, parts[0])
    except ClientFault as fault:
        _fail(worker, job, fault, failed)
        return True
    worker.write(framing.ANSWER, answer)
    return True
