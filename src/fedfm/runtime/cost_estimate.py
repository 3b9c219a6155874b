"""Estimates before a run starts, for ``fedfm check``: rows, bytes, time and memory."""

from __future__ import annotations

import math
import resource
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import get_type_hints

import numpy as np

from fedfm import seeds
from fedfm.attacks.attack import halves_of
from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import Planned, has
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.libraries import refuse
from fedfm.core.method import fraction_of
from fedfm.core.wire import codec
from fedfm.linalg.params import Params
from fedfm.linalg.precisions import EXACT
from fedfm.runtime.client_timeout import step_seconds
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import TrainsLocally
from fedfm.training.scheduler import by_autograd, compiles, train_client

_WHOLE = 10.0  # if a client's round takes fewer seconds, the estimate trains a complete round, otherwise one step
_LOAD = 0.3  # seconds that compiled loops take to load; if torch trains a round in less time, the estimate uses torch
_BRIEF = 5.0  # if all rounds together take fewer seconds, an upper bound is enough


@dataclass(frozen=True)
class Forecast:
    """Estimates for a run. A field is None if it cannot be known before the run, e.g. the bytes of a Gaussian mixture.

    Attributes:
        rows: for each client the numbers of training, validation and test rows.
        counts: for each client and class the number of training rows; empty without labels.
        bytes_up, bytes_down: bytes of one client's messages in a round.
        client_seconds: time of local training of the largest client in a round, on this machine, in one process.
        run_seconds: time of local training of all clients in all rounds, in one process.
        at_most: whether these times are upper bounds. Times measured with torch are upper bounds if the run uses
            compiled loops.
        memory: peak memory in bytes of this process, after it has read rows and model and trained for the estimate.
    """

    rows: dict[ClientId, tuple[int, int, int]]
    counts: dict[ClientId, dict[str, int]]
    bytes_up: int | None
    bytes_down: int | None
    client_seconds: float | None
    run_seconds: float | None
    at_most: bool
    memory: int

    @property
    def by_class(self) -> dict[ClientId, list[int]]:
        """Each client's numbers of training rows in the order of the classes; empty without labels."""
        return {client: list(rows.values()) for client, rows in self.counts.items()}


def forecast(experiment: Experiment, population: Partitioned) -> Forecast:
    """Estimate a run on this machine by training one client's round, or only one step if a round takes long."""
    method, federated = experiment.method, population.federated
    clients = {name: federated.clients[name] for name in population.clients}
    table = federated.table
    counts: dict[ClientId, dict[str, int]] = {}
    if table.labels is not None and table.classes:
        for name, part in clients.items():
            of = np.bincount(table.labels[part.train], minlength=len(table.classes))
            counts[name] = {label: int(n) for label, n in zip(table.classes, of, strict=False)}
    up, down = _bytes(experiment, population)
    largest = max((len(part.train) for part in clients.values()), default=0)
    share = sum(len(part.train) for part in clients.values()) / max(largest, 1)
    late = experiment.run.asynchronous
    asked = fraction_of(method) if late is None else min(late.buffer / len(clients), 1.0)
    times = share * asked * method.rounds
    seconds, at_most = _client_seconds(experiment, population, times)
    return Forecast(
        population.counts(),
        counts,
        up,
        down,
        seconds,
        None if seconds is None else seconds * times,
        at_most,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1),
    )


def _bytes(experiment: Experiment, population: Partitioned) -> tuple[int | None, int | None]:
    """Return bytes up and down, from the types that client halves take and return; None if they are unknown."""
    model, needs, halves = population.client_model, experiment.method.needs, halves_of(experiment.method)
    if needs.pooled or experiment.run.transport != EXACT or model is None or not halves:
        return None, None
    if not isinstance(experiment.method, TrainsLocally):
        return None, None
    w, up, down = model.params(), 0, 0
    for half in halves:
        hints = get_type_hints(half)
        returned = hints.pop("return", None)
        if returned not in (Params, Update):
            return None, None
        up += codec.weigh(Update(w, 1.0, {"loss": 0.0}) if returned is Update else w)
        down += codec.weigh({name: w for name, hint in hints.items() if hint is Params})
    return (up, down) if up and experiment.aggregation.transport.form == "plain" else (None, None)


def _client_seconds(experiment: Experiment, population: Partitioned, times: float) -> tuple[float | None, bool]:
    """Return the seconds of the largest client's round, and whether they are an upper bound.

    Args:
        times: ratio of the training time of the complete run to the time of this round.
    """
    method, model = experiment.method, population.client_model
    if model is None or not isinstance(method, TrainsLocally) or population.federated.table.kind == "own":
        return None, False
    clients = population.federated.clients
    name = max(clients, key=lambda client: len(clients[client].train))
    data = population.data(name)
    if not len(data.train):
        return None, False
    size = min(method.local.batch_size, len(data.train))
    passes = (method.passes if has(method, Planned, "passes") else method.local.passes) / max(method.local.epochs, 1)
    with refuse(f"model.name: {model.spec.name!r} fails in training on these rows"):
        each = step_seconds(model, data.train, size)
    if each is not None and each < 5:  # time another step, since the first one also loads libraries
        each = step_seconds(model, data.train, size)
    if each is None:
        return None, False
    seconds = each * method.local.steps(len(data.train), model) * passes
    if seconds > _WHOLE or experiment.aggregation.mechanism.plan is not None:
        return seconds, False
    at_most = compiles(model, method.local) and seconds < _LOAD and seconds * times < _BRIEF
    client = Client(
        id=name,
        data=data,
        model=model,
        memory={},
        seed=seeds.derive(experiment.run.seed, "forecast"),
        trainer=train_client,
    )
    w, spent = model.params(), math.inf
    with by_autograd() if at_most else nullcontext():  # torch is slower, so its time bounds the run's
        for _ in range(2):
            began = time.perf_counter()
            method.local(client, w)
            spent = min(spent, time.perf_counter() - began)
            if 1 < spent < 3 * seconds:  # a much longer first pass included compilation
                break
    model.load(w)
    return spent * passes, at_most
