"""Worker processes of the local engine. On a CPU they are forked and share model and data; on GPUs they are spawned.

Payloads and replies are in memory files (:mod:`fedfm.engines.shared_memory`). Control messages are short JSON
texts on a socket pair, with the descriptors of new files; nothing is pickled. A worker whose clients take milliseconds
gets its next chunk of requests in advance, since the server may wait longer than that for a core. Workers are child
processes, so the pool notices at once that a worker has ended, and by which signal. It then sends the worker's chunk
again. This is safe: a client's memory is versioned by (round, call), so a repeated request finds the same state.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fedfm.core.client import ClientId
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import payload
from fedfm.core.wire.envelope import envelope_size
from fedfm.engines.child_processes import cause
from fedfm.engines.local.forked import fork
from fedfm.engines.local.spawned import MOST, Spawned
from fedfm.engines.shared_memory import Outbox, Payloads, data_at, laid_out, map_file, message
from fedfm.errors import E_DIED, E_EXCEPTION, E_TIMEOUT, ClientFault, RunError
from fedfm.linalg.kernels import buffers
from fedfm.runtime.client import Silos

_LIMIT = 1 << 16  # bytes of a control message
_FDS = 64  # largest number of descriptors in one control message; Linux allows 253
_QUICK = 0.005  # a worker that takes fewer seconds per client gets a second chunk, which may run after a stop
_SHORT = 0.001  # clients that take fewer seconds get chunks of double length, since messages cost time


@dataclass
class _Worker:
    pid: int
    socket: socket.socket
    # Chunks sent and not yet answered, the current one first.
    chunks: deque[list[Request]] = field(default_factory=deque)
    begun: float = 0.0  # start time of the current chunk
    pace: float = math.inf  # seconds per client in the last chunk
    known: set[int] = field(default_factory=set)  # ids of the payloads that the worker got in this exchange
    boxes: dict[int, np.ndarray] = field(default_factory=dict)  # the worker's files for replies, memory-mapped
    freed: deque[int] = field(default_factory=deque)  # files that no tensor of this process uses any more

    def deadline(self, timeout: float) -> float:
        """The time after which the current chunk is late: each of its clients may take ``timeout`` seconds."""
        return self.begun + timeout * len(self.chunks[0])

    def finish_chunk(self) -> list[Request]:
        """Remove the current chunk from the queue and return it."""
        chunk, now = self.chunks.popleft(), time.monotonic()
        self.pace, self.begun = (now - self.begun) / len(chunk), now
        return chunk


@dataclass
class _Exchange:
    """State of one exchange."""

    waiting: list[list[Request]]  # chunks that no worker has
    payloads: Payloads
    stop: Callable[[], bool]
    places: dict[ClientId, int]  # slot of each client's worker
    help: bool  # whether idle workers take chunks of other workers
    suspects: set[ClientId] = field(default_factory=set)  # clients that ran alone in a worker when it died


class Pool:
    """A pool of ``count`` workers. Each client belongs to the worker that has its rows cached; idle workers help.

    Args:
        spawn: starts a slot's worker as a program; if None, workers are forked.
        notice: called with a line on a worker that ended and was replaced, once for each way to end.
    """

    def __init__(
        self,
        silos: Silos,
        count: int,
        timeout: float,
        spawn: Callable[[int], Spawned] | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        if spawn is None and not hasattr(os, "fork"):
            raise RunError('this system cannot fork: set run.workers = 1 for engine = "local"')
        self._silos, self._count, self._timeout, self._spawn = silos, count, timeout, spawn
        self._notice, self._noticed = notice, set[str]()
        self._workers: list[_Worker] = []
        self._home: dict[ClientId, int] = {}  # slot of each client's worker
        self._last: dict[ClientId, int] = {}  # slot of the worker that last answered for each client

    def exchange(
        self, requests: Sequence[Request], stop: Callable[[], bool], *, again: bool = False
    ) -> Iterator[Reply]:
        """Deliver requests and yield replies; after ``stop`` no further chunk starts.

        Args:
            again: send each request to the worker that last answered for the client, because it has cached results.
        """
        missing = min(self._count, max(len(requests), 1)) - len(self._workers)
        if missing > 0:
            self._silos.prepare(requests)
            self._workers += self._start(range(len(self._workers), len(self._workers) + missing))
        for worker in self._workers:
            worker.known.clear()
        places = self._last if again else self._home
        waiting = self._chunks(requests, len(requests) if again else self._silos.width, places)
        now = _Exchange(waiting, Payloads(requests), stop, places, help=not again)
        try:
            with selectors.DefaultSelector() as selector:
                for slot, worker in enumerate(self._workers):
                    selector.register(worker.socket, selectors.EVENT_READ, slot)
                while True:
                    for helps in (False, True):  # first each worker gets its own clients
                        for slot in range(len(self._workers)):
                            self._feed(slot, selector, now, helps)
                    busy = [w for w in self._workers if w.chunks]
                    if not busy:
                        break
                    patience = max(min(w.deadline(self._timeout) for w in busy) - time.monotonic(), 0.0)
                    ready = selector.select(min(patience, 1.0))
                    for key, _ in ready:
                        slot = key.data
                        worker = self._workers[slot]
                        if not worker.chunks:  # an idle worker sends nothing, so this one has ended
                            self._say(self._replace(slot, selector), "between two requests")
                            continue
                        answer = _receive(worker)
                        if answer is None:
                            yield from self._replace_lost(slot, selector, now, None)
                            continue
                        answered = worker.finish_chunk()
                        # The worker continues while its replies are read.
                        self._feed(slot, selector, now, helps=True)
                        yield from _replies(answered, worker, *answer, now.payloads, self._silos.room)
                    for slot, worker in enumerate(self._workers):
                        if worker.chunks and time.monotonic() > worker.deadline(self._timeout):
                            yield from self._replace_lost(slot, selector, now, self._timeout)
        finally:
            now.payloads.close()

    def _chunks(self, requests: Sequence[Request], width: int, places: dict[ClientId, int]) -> list[list[Request]]:
        """Divide requests into chunks of at most ``width`` clients, each for one worker's slot; large chunks come
        first.

        The chunks of a slot get smaller, down to ``silos.least``, so that all workers end at about the same time. A
        last chunk with less than half of ``silos.least`` joins the chunk before it. A client without a slot gets the
        slot with the fewest clients.
        """
        groups: list[list[Request]] = [[] for _ in self._workers]
        new: list[Request] = []
        for request in requests:
            place = places.get(request.client)
            (new if place is None else groups[place]).append(request)
        for request in new:
            place = places[request.client] = min(range(len(groups)), key=lambda slot: len(groups[slot]))
            groups[place].append(request)
        chunks = []
        short = all(worker.pace < _SHORT for worker in self._workers)
        for group in groups:
            fewest = min(self._silos.least * (1 + short), len(group))
            while group:
                size = max(-(-len(group) // 2), fewest)
                if 2 * (len(group) - size) < fewest:
                    size = len(group)
                chunks.append(group[: min(width, size)])
                group = group[min(width, size) :]
        return sorted(chunks, key=lambda chunk: (-len(chunk), chunk[0].client))

    def _feed(self, slot: int, selector: selectors.BaseSelector, now: _Exchange, helps: bool) -> None:
        """Send the slot's worker its next chunk, or the part of it that fits into one control message.

        A fast worker gets two chunks. With ``helps`` an idle worker takes a chunk of another worker; the chunk's
        clients still belong to that other worker.
        """
        while len(self._workers[slot].chunks) < 1 + (self._workers[slot].pace < _QUICK) and not now.stop():
            mine = (i for i, chunk in enumerate(now.waiting) if now.places[chunk[0].client] == slot)
            at = next(mine, -1)
            if at < 0 and not (now.waiting and now.help and helps and not self._workers[slot].chunks):
                return
            chunk = now.waiting.pop(at)
            if not self._deliver(slot, chunk, now):
                if self._workers[slot].chunks:
                    return  # the caller notices at the worker's socket that the worker has ended
                # The worker ended while idle, so no client caused it.
                self._say(self._replace(slot, selector), "between two requests")

    def _deliver(self, slot: int, chunk: list[Request], now: _Exchange) -> bool:
        """Send the chunk. Returns False if the worker has ended. Requests that could not be sent wait again."""
        worker, payloads = self._workers[slot], now.payloads
        fds: list[int] = []
        texts: list[str] = []
        freed = [worker.freed.popleft() for _ in range(len(worker.freed))]
        new, length = set[int](), 2 + len(str(freed)) + 2
        for request in chunk:
            number = payloads.number(request)
            fd = -1 if number in worker.known or number in new else len(fds)
            head, once = payloads.heads[number], payloads.once(request)
            # json.dumps would take a third of the time that sending a request takes.
            names = f"{payload.quote(request.client)}, {payload.quote(request.handler)}"
            text = f"[{names}, {request.round}, {request.call}, {number}, {fd}, {head}, {once:d}]"
            if texts and (length + len(text) + 2 > _LIMIT or fd == _FDS):
                break
            if fd >= 0:
                new.add(number)
                fds.append(payloads.files[number])
            texts.append(text)
            length += len(text) + 2
        taken, rest = chunk[: len(texts)], chunk[len(texts) :]
        try:
            socket.send_fds(worker.socket, [f"[{freed}, {', '.join(texts)}]".encode()], fds)
        except (BrokenPipeError, ConnectionResetError):
            now.waiting.insert(0, chunk)
            return False
        if rest:
            now.waiting.insert(0, rest)
        worker.known |= new
        if not worker.chunks:
            worker.begun = time.monotonic()
        worker.chunks.append(taken)
        self._last.update((request.client, slot) for request in taken)
        return True

    def _replace(self, slot: int, selector: selectors.BaseSelector) -> int:
        """Replace a worker that has ended; returns the ended worker's status."""
        worker = self._workers[slot]
        selector.unregister(worker.socket)
        worker.socket.close()
        _, status = os.waitpid(worker.pid, 0)
        (self._workers[slot],) = self._start([slot])
        selector.register(self._workers[slot].socket, selectors.EVENT_READ, slot)
        return status

    def _replace_lost(
        self, slot: int, selector: selectors.BaseSelector, now: _Exchange, timeout: float | None
    ) -> Iterator[Reply]:
        """Replace a worker that died or exceeded its time.

        The requests of its current chunk are repeated one at a time, so that one client cannot affect others. A client
        is at fault if it exceeds its time limit, or if two workers died while they ran only this client.
        """
        worker = self._workers[slot]
        if timeout is not None:
            os.kill(worker.pid, signal.SIGKILL)
        status = self._replace(slot, selector)
        chunk, *rest = worker.chunks
        now.waiting[:0] = rest  # the worker had not begun these
        if len(chunk) > 1:
            now.waiting.extend([request] for request in chunk)
            late = "" if timeout is None else f", which took more than {timeout * len(chunk):g} s"
            self._say(status, f"with the requests of {len(chunk)} clients{late}: each is sent again alone")
            return
        (request,) = chunk
        if timeout is None and request.client not in now.suspects:
            now.suspects.add(request.client)
            now.waiting.append(chunk)
            self._say(status, f"with a request of {request.client}, which is sent again")
            return
        if timeout is not None:
            fault = ClientFault(E_TIMEOUT, f"no reply within {timeout:g} s; its process was ended")
        else:
            fault = ClientFault(E_DIED, f"its process died, and so did a second one: {cause(status)}")
        yield Reply(request.client, None, request.round, request.call, 0, 0, fault)

    def _say(self, status: int, what: str) -> None:
        """Notify the user that a worker ended and was replaced: the run goes on, but takes longer."""
        how = cause(status)
        if how not in self._noticed:
            self._noticed.add(how)
            self._notice(f"a worker process ended, {how}, {what}; a new process takes its place")

    def _start(self, slots: Sequence[int]) -> list[_Worker]:
        """Start workers in these slots and wait until they are ready, so that loading does not count as a client's
        time.

        Raises:
            RunError: a worker could not load rows or model.
        """
        if self._spawn is None:
            return [_Worker(*fork(partial(work, self._silos))) for _ in slots]
        workers = [_Worker(*self._spawn(slot)) for slot in slots]
        for worker in workers:  # all of them load at the same time
            text = worker.socket.recv(MOST)
            if not text or json.loads(text):
                for other in workers:
                    other.socket.close()
                    os.waitpid(other.pid, 0)
                raise RunError(f"a worker on a GPU did not start: {json.loads(text) if text else 'it was ended'}")
        return workers

    def close(self) -> None:
        """Close the sockets of all workers; then idle workers end."""
        for worker in self._workers:
            worker.socket.close()
            if worker.chunks:
                os.kill(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
        self._workers = []


def _receive(worker: _Worker) -> tuple[bytes, list[int]] | None:
    """A worker's message, and the descriptors of new memory files; None if the worker has ended."""
    try:
        text, fds, _, _ = socket.recv_fds(worker.socket, _LIMIT, 1)
    except OSError:
        return None
    return (text, fds) if text else None


def _replies(
    requests: Sequence[Request], worker: _Worker, text: bytes, fds: list[int], payloads: Payloads, most: int
) -> Iterator[Reply]:
    """The replies of a chunk, decoded one by one on demand."""
    box, lines = json.loads(text)
    if fds:
        worker.boxes[box] = map_file(fds[0], shared=box >= 0)
    at, block = 0, buffers.lease(worker.boxes[box], worker.freed, box) if box >= 0 else worker.boxes.pop(box)
    for request, (code, reason, head_size, data_size) in zip(requests, lines, strict=True):
        fault, value, up = (ClientFault(code, reason) if code else None), None, 0
        if fault is None:
            try:
                value = message(block, at, head_size, data_size, most)
                up = envelope_size(head_size, data_size)
            except ClientFault as bad:
                fault = bad
            at = data_at(at, head_size) + data_size
        payloads.release(request)
        yield Reply(request.client, value, request.round, request.call, payloads.nbytes(request), up, fault)


def _answers(silos: Silos, requests: Sequence[Request]) -> Iterator[Any]:
    """The clients' answers; a payload that is a fault is the answer itself."""
    good = [request for request in requests if not isinstance(request.payload, ClientFault)]
    found = iter(silos.answer(good) if good else ())
    for request in requests:
        yield request.payload if isinstance(request.payload, ClientFault) else next(found)


def work(silos: Silos, link: socket.socket) -> None:
    """Main loop of a worker: receive requests and answer them until the socket closes."""
    payloads: dict[int, Any] = {}
    exchange, outbox = (-1, -1), Outbox()
    while True:
        text, fds, _, _ = socket.recv_fds(link, _LIMIT, _FDS)
        if not text:
            return
        freed, *tasks = json.loads(text)
        outbox.mark_free(freed)
        if (tasks[0][2], tasks[0][3]) != exchange:
            payloads, exchange = {}, (tasks[0][2], tasks[0][3])
        requests = []
        for client, handler, round, call, number, fd, head, _ in tasks:
            if fd >= 0:
                block = map_file(fds[fd], shared=False)
                size = len(block) - data_at(0, head)
                try:
                    payloads[number] = silos.conform(handler, message(block, 0, head, size, silos.room))
                except ClientFault as fault:
                    payloads[number] = fault
            requests.append(Request(client, handler, payloads[number], round, call))
        for *_, number, _, _, once in tasks:
            if once:
                del payloads[number]
        # For each reply: code and reason of a fault, or else lengths of head and data.
        lines: list[tuple[str, str, int, int]] = []
        pieces: payload.Pieces = []
        end = 0
        for value in _answers(silos, requests):
            try:
                if isinstance(value, ClientFault):
                    raise value
                head, data = payload.encode(value)
            except TypeError as error:  # the value cannot be serialised
                lines.append((E_EXCEPTION, str(error)[:400], 0, 0))
            except ClientFault as fault:
                lines.append((fault.code, fault.reason[:400], 0, 0))
            else:
                lines.append(("", "", len(head), sum(map(len, data))))
                pieces += laid_out(end, head, data)
                end = data_at(end, len(head)) + lines[-1][-1]
        box, new = outbox.put(pieces)
        socket.send_fds(link, [json.dumps([box, lines]).encode()], new)
        for fd in new:
            os.close(fd)
