"""The local engine: all clients on this machine, without network sockets or start-up cost.

With one worker the clients run in this process, and tensors are passed by reference. With several workers they run in
forked processes, which share the model and the data with this one. On GPUs the workers are spawned processes, which
load model and data themselves. The results do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfm.config.cohorts import enough
from fedfm.core.capabilities import HiddenModel
from fedfm.core.client import ClientId
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec
from fedfm.engines.interruption import Interrupted
from fedfm.errors import E_EXCEPTION, E_TIMEOUT, ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.models import devices
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import ROUNDS
from fedfm.runtime.evaluation import SCORE_HANDLER
from fedfm.runtime.judge import judge
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate, record_error
from fedfm.runtime.predictions import logits
from fedfm.runtime.run_manifest import describe
from fedfm.runtime.server import Server
from fedfm.training import scheduler

if TYPE_CHECKING:
    from fedfm.config.run_spec import RunSpec
    from fedfm.engines.local.spawned import Spawned
    from fedfm.engines.local.worker_pool import Pool
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

JUDGE = "server.judge"


class Judges(Silos):
    """The clients of this machine, which also return logits of global test rows to the server on this machine.

    These rows belong to the server, so policy, attacks and transcript do not apply to these messages.
    """

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        if requests[0].handler != JUDGE:
            return super().answer(requests)
        model = self.population.client_model
        if model is None:
            raise RunError("the clients of this method have no model that predicts")
        w, piece = requests[0].payload["w"], self.population.piece  # type: ignore[attr-defined]
        # As the server computes them: a client optimiser may have parameters that the model alone does not take.
        calls = [lambda of=r.client: logits(self.method, model, w, piece(of)) for r in requests]
        found = zip(requests, scheduler.run_chunk(calls, together=False), strict=True)
        return [self.fault(r.client, value) if isinstance(value, BaseException) else value for r, value in found]


class LocalLink:
    """Delivers requests by calling :class:`Silos` directly, or in worker processes.

    Args:
        workers: number of processes; 1 runs the clients in this process.
        timeout: seconds that one client may take. Only worker processes can be stopped.
        wire: whether to serialise and decode every message as Flower would.
        stop: called between clients; True raises :class:`Interrupted`.
        spawn: given a worker's number, starts this worker as a separate program; if None, workers are forked.
        notice: called with a line on what the worker processes could not do; the run goes on without it, but slower.
    """

    def __init__(
        self,
        silos: Silos,
        *,
        workers: int = 1,
        timeout: float = 600.0,
        wire: bool = False,
        stop: Callable[[], bool] = lambda: False,
        progress: Callable[[], None] = lambda: None,
        spawn: Callable[[int], Spawned] | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._notice, self._unjudged = notice, False
        self._silos, self._wire, self._stop, self._progress = silos, wire, stop, progress
        self._pool: Pool | None = None
        if workers > 1:
            from fedfm.engines.local.worker_pool import Pool

            self._pool = Pool(silos, workers, timeout, spawn, notice)
        self._timeout, self._judged = timeout, 0
        # Reference to the parameters of the last evaluation, and its scores by client.
        self._scored: tuple[Any, dict[ClientId, dict[str, Any]]] = ((lambda: None), {})

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._silos.population.clients

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        if requests[0].handler != SCORE_HANDLER or requests[0].payload["part"] != "test":
            yield from self._exchange(requests)
            return
        asked: Params | None = requests[0].payload["w"]
        if any(request.payload["w"] is not asked for request in requests) or not isinstance(asked, Params):
            asked = None  # None if clients have their own models, or the parameters are encoded
        found: dict[ClientId, dict[str, Any]] = {}
        for reply in self._exchange(requests):
            if reply.fault is None and asked is not None:
                found[reply.client] = reply.value
            yield reply
        if asked is not None:
            self._scored = weakref.ref(asked), found

    def last_scores(self, w: Params) -> dict[ClientId, dict[str, Any]]:
        """The clients' scores of the last evaluation if it evaluated this same object ``w``; otherwise empty."""
        of, found = self._scored
        return found if of() is w else {}

    def _exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        if self._stop():
            raise Interrupted
        if self._pool is not None:
            for reply in self._pool.exchange(requests, self._stop):
                self._progress()
                yield reply
        else:
            payload, down = None, 0
            width = self._silos.width
            for start in range(0, len(requests), width):
                chunk = requests[start : start + width]
                began = time.monotonic()
                values = self._answer(chunk)
                # A call in this process cannot be stopped. If it is late, it counts as a timeout, as in a worker.
                late = time.monotonic() - began > self._timeout * len(chunk)
                for request, value in zip(chunk, values, strict=True):
                    self._progress()
                    if late and not isinstance(value, ClientFault):
                        value = ClientFault(E_TIMEOUT, f"it took more than {self._timeout:g} s")
                    if request.payload is not payload:  # the size of a broadcast is computed once
                        payload, down = request.payload, codec.weigh(request.payload)
                    yield _reply(request, value, down)
                if self._stop():
                    raise Interrupted
        if self._stop():
            raise Interrupted

    def judge(self, w: Params) -> dict[ClientId, Tensor]:
        """Logits of all pieces of the global test rows.

        The worker that evaluated a client's piece has cached results, so this worker computes the piece's logits.

        Raises:
            Interrupted: the user stopped the run.
        """
        if self._pool is None:
            return {}
        self._judged += 1  # gives a new round number below all others, so that workers recognise the payload as new
        pieces = self._silos.population.pieces  # type: ignore[attr-defined]
        payload = {"w": w}  # one object for all requests, so that it is encoded once
        requests = [Request(name, JUDGE, payload, -1 - self._judged, 0) for name in pieces]
        replies = list(self._pool.exchange(requests, self._stop, again=True))
        if self._stop():
            raise Interrupted
        faults = [f"{reply.client}: {reply.fault}" for reply in replies if reply.fault is not None]
        if faults and not self._unjudged:
            self._unjudged = True
            self._notice(
                f"worker processes could not compute {len(faults)} of {len(replies)} parts of the global test rows, "
                f"so this process computes them, which takes longer ({faults[0]})"
            )
        return {reply.client: reply.value for reply in replies if reply.fault is None}

    def _answer(self, chunk: Sequence[Request]) -> Sequence[object]:
        if not self._wire:
            return self._silos.answer(chunk)
        from fedfm.engines.flower.private_api import over_the_wire

        return over_the_wire(self._silos, chunk)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def _reply(request: Request, value: object, down: int) -> Reply:
    """A reply, with the bytes of both directions."""
    if not isinstance(value, ClientFault):
        try:
            return Reply(request.client, value, request.round, request.call, down, codec.weigh(value))
        except TypeError as error:  # the value cannot be serialised
            value = ClientFault(E_EXCEPTION, str(error))
    return Reply(request.client, None, request.round, request.call, down, 0, value)


def fidelity(silos: Silos, population: Partitioned) -> dict[str, float]:
    """The largest differences, over all clients, between the rows that clients train on and the same rows in the
    server's table.
    """
    method, found = silos.method, dict[str, float]()
    if not isinstance(method, HiddenModel):
        return found
    for client in population.clients:
        try:
            seen = method.view(silos.client(Request(client, "", {}, ROUNDS, 0))).data
        except ClientFault:  # the client was left out
            continue
        index = population.federated.clients[client]
        figures = method.fidelity(seen, lambda part, index=index: population.rows(getattr(index, part)))  # type: ignore[misc]
        found |= {name: max(value, found.get(name, value)) for name, value in figures.items()}
    return found


def processes(workers: int, device: torch.device) -> int:
    """Number of forked processes for ``run.workers``; on a CPU, 0 means one per core.

    If the model is on an accelerator, the number is 1: a child process cannot use one that its parent has opened.
    On GPUs workers are spawned instead, see :func:`visible_devices`.

    Raises:
        InputError: several processes are requested on an accelerator that is not a GPU.

    Example:
        >>> processes(3, torch.device("cpu")), processes(0, torch.device("cuda"))
        (3, 1)
    """
    if device.type == "cpu":
        return workers or os.cpu_count() or 1
    if workers not in (0, 1):
        raise InputError(
            f"run.workers = {workers}: a model on {device.type} runs in one process, expected 1 "
            '(or model.device = "cpu")'
        )
    return 1


def visible_devices(spec: RunSpec, name: str, device: torch.device) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each spawned worker; empty if this process does all work.

    Args:
        name: ``model.device``.
        device: the device of this process's model.

    Raises:
        InputError: there are more workers than ``run.gpus_per_client`` allows.
    """
    if device.type != "cuda" or (name == devices.MAP and spec.gpus_per_client is None):
        return []
    from fedfm.models import cuda_devices

    gpus = cuda_devices.visible(os.environ, torch.cuda.device_count())
    if ":" in name:
        gpus = [gpus[device.index or 0]]
    each = spec.gpus_per_client or 1.0
    found = cuda_devices.visible_to_processes(gpus, each)
    count = spec.workers or len(found)
    if count > len(found):
        raise InputError(
            f"run.workers = {count}: with run.gpus_per_client = {each:g} there is room for {len(found)} on "
            f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}; use at most this many workers, or a smaller run.gpus_per_client"
        )
    return found[:count] if count > 1 else []


def silos_of(run: Run, population: Partitioned) -> Judges:
    """The clients of a run in one process."""
    experiment = run.experiment
    return Judges(
        experiment.method,
        experiment.aggregation,
        population,
        memory=run.path / "private" / "memory",
        seed=experiment.run.seed,
        attack=population.attackers,
        on_error=partial(record_error, run.path),
        reveal=experiment.privacy is None and experiment.aggregation.transport.form == "plain",
        local_scores=experiment.run.local_scores,
        transport=experiment.run.transport,
    )


def start(
    run: Run, stop: Callable[[], bool], progress: Progress, given: Callable[[], Partitioned] | None = None
) -> dict[str, Any]:
    """Run to the end, in this process and its workers. ``given`` returns rows and model if they are in memory
    already.
    """
    experiment = run.experiment
    spec = experiment.run
    with torch_threads(1), contextlib.ExitStack() as stack:
        population = given() if given is not None else populate(experiment)
        if spec.processes_per_client > 1:
            from fedfm.training.sharded.group_model import running

            stack.enter_context(running(population.model))
        describe(run, population, progress)
        enough(experiment, population.clients)
        silos, device = silos_of(run, population), population.model.device
        places = visible_devices(spec, experiment.model.device, device) if given is None else []
        start = None
        if places:
            from fedfm.engines.local.spawned import spawn

            start = partial(spawn, run.path)
        workers = len(places) or (1 if spec.processes_per_client > 1 else processes(spec.workers, device))
        seconds = math.inf  # a client in this process cannot be stopped, so a late result counts
        if workers > 1 or not spec.extend_timeout:
            from fedfm.runtime.client_timeout import patience

            seconds = patience(experiment.method, population, spec, progress.notice)

        def tell(text: str) -> None:
            run.note(text)
            progress.notice(text)

        link = LocalLink(
            silos,
            workers=workers,
            timeout=seconds,
            wire=spec.wire,
            stop=stop,
            progress=progress.client,
            spawn=None if start is None else lambda slot: start(places[slot]),
            notice=tell,
        )
        try:
            scores = judge(population, experiment.method, link.judge, link.last_scores)
            aside = partial(fidelity, silos, population)
            return Server(run, link, population.model, judge=scores, progress=progress, aside=aside).go()
        finally:
            link.close()
