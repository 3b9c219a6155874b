"""The local engine: all clients on this machine, no sockets to the outside, no start-up cost.

With one worker the clients run in this process and tensors pass by reference; with more, in forked worker processes
that share the model and the data with this one. What a client computes does not depend on it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfm.config.compatibility import enough
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec
from fedfm.engines.local.worker_pool import Pool
from fedfm.errors import E_EXCEPTION, E_TIMEOUT, ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.client import Silos
from fedfm.runtime.client_memory import of_server, secret
from fedfm.runtime.evaluation import judge
from fedfm.runtime.population import Partitioned, describe, populate, record_error
from fedfm.runtime.server import Server

if TYPE_CHECKING:
    from fedfm.runtime.progress import Progress
    from fedfm.runtime.run_directory import Run

JUDGE = "server.judge"


class Interrupted(KeyboardInterrupt):
    """The user asked to stop; what is committed stays, and the clients that had started have finished."""


class Judges(Silos):
    """Silos that also tell this machine's server their logits on global test rows: its own rows, in its own processes.

    That is no message of the method: the silos' policy, attacks and the transcript have no part in it.
    """

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """As :meth:`Silos.answer`."""
        if requests[0].handler != JUDGE:
            return super().answer(requests)
        model = self.population.client_model
        model.load(requests[0].payload["w"])
        return [model.predict(self.population.piece(request.client)) for request in requests]  # type: ignore[attr-defined]


class LocalLink:
    """Delivers requests by calling :class:`Silos` directly.

    Args:
        workers: processes; 1 runs the clients in this one.
        timeout: seconds that one client may take (only worker processes can be stopped).
        wire: serialise every message as Flower would send it, and decode it again.
        stop: asked between clients; True raises :class:`Interrupted`.
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
    ) -> None:
        self._silos, self._wire, self._stop, self._progress = silos, wire, stop, progress
        self._pool = Pool(silos, workers, timeout) if workers > 1 else None
        self._timeout, self._judged = timeout, 0

    @property
    def clients(self) -> Sequence[ClientId]:
        """Names, sorted."""
        return self._silos.population.clients

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver; replies come as clients finish."""
        if self._stop():
            raise Interrupted
        if self._pool is not None:
            for reply in self._pool.exchange(requests, self._stop):
                self._progress()
                yield reply
        else:
            weigh = _Weigher()
            width = self._silos.width
            for start in range(0, len(requests), width):
                chunk = requests[start : start + width]
                began = time.monotonic()
                values = self._answer(chunk)
                # Nothing ends a call in this process; that it took too long counts as it does in a worker.
                late = time.monotonic() - began > self._timeout * len(chunk)
                for request, value in zip(chunk, values, strict=True):
                    self._progress()
                    if late and not isinstance(value, ClientFault):
                        value = ClientFault(E_TIMEOUT, f"it took more than {self._timeout:g} s")
                    yield weigh(request, value)
                if self._stop():
                    raise Interrupted
        if self._stop():
            raise Interrupted

    def judge(self, w: Params) -> dict[ClientId, Tensor]:
        """Logits of the pieces of the global test rows, each from the worker that judged it as a client's.

        Raises:
            Interrupted: not all are there.
        """
        if self._pool is None:
            return {}
        self._judged += 1  # with a round below any other, so that workers know the payload as new
        pieces = self._silos.population.pieces  # type: ignore[attr-defined]
        payload = {"w": w}  # one for all: it is encoded once
        requests = [Request(name, JUDGE, payload, -1 - self._judged, 0) for name in pieces]
        replies = list(self._pool.exchange(requests, self._stop, again=True))
        if self._stop():
            raise Interrupted
        return {reply.client: reply.value for reply in replies if reply.fault is None}

    def _answer(self, chunk: Sequence[Request]) -> Sequence[object]:
        if not self._wire:
            return self._silos.answer(chunk)
        from fedfm.engines.flower.private_api import over_the_wire

        return over_the_wire(self._silos, chunk)

    def close(self) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.close()


class _Weigher:
    """Builds replies with the bytes of both directions; a broadcast payload is weighed once."""

    def __init__(self) -> None:
        self._payload: object = None
        self._nbytes = 0

    def __call__(self, request: Request, value: object) -> Reply:
        if self._payload is not request.payload:
            self._payload = request.payload
            self._nbytes = codec.weigh(request.payload)
        if isinstance(value, ClientFault):
            return Reply(request.client, None, request.round, request.call, self._nbytes, 0, value)
        try:
            up = codec.weigh(value)
        except TypeError as error:  # something that cannot travel
            fault = ClientFault(E_EXCEPTION, str(error))
            return Reply(request.client, None, request.round, request.call, self._nbytes, 0, fault)
        return Reply(request.client, value, request.round, request.call, self._nbytes, up)


def processes(workers: int, device: torch.device) -> int:
    """``run.workers``; of 0 one a core. One where the model is on an accelerator: forked processes cannot use one that
    this process has opened.

    Raises:
        InputError: several, on an accelerator.

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


def start(
    run: Run, stop: Callable[[], bool], progress: Progress, given: Callable[[], Partitioned] | None = None
) -> dict[str, Any]:
    """Run to the end in this process and its workers; ``given`` gives rows and model that are in memory."""
    experiment = run.experiment
    spec = experiment.run
    with torch_threads(1):
        population = given() if given is not None else populate(experiment)
        describe(run, population, progress)
        enough(experiment, len(population.clients))
        silos = Judges(
            experiment.method,
            experiment.aggregation,
            population,
            memory=run.path / "private" / "memory",
            seed=spec.seed,
            attack=population.attackers,
            on_error=partial(record_error, run.path),
            reveal=experiment.privacy is None,
            local_scores=spec.local_scores,
        )
        link = LocalLink(
            silos,
            workers=processes(spec.workers, population.model.device),
            timeout=spec.timeout,
            wire=spec.wire,
            stop=stop,
            progress=progress.client,
        )
        fed = Federation(
            link,
            model=population.model,
            aggregator=experiment.aggregation,
            seed=spec.seed,
            min_clients=spec.min_clients,
            on_excluded=progress.excluded,
            secret=partial(secret, run.path / "private", "server"),
            memory=of_server(run.path / "private"),
        )
        try:
            return Server(run, fed, judge=judge(population, experiment.method, link.judge), progress=progress).go()
        finally:
            link.close()
