"""The time that the server waits for a client: ``run.timeout``, or longer if training steps are slow.

If a client's work could take minutes, the server measures one training step before the first round. Without this, a
short timeout would discard the work of slow clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fedfm.config.run_spec import RunSpec
from fedfm.core.capabilities import Planned, has
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.models.model import Model
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import TrainsLocally

_SLACK = 4.0  # the measured time is multiplied by this, since a client's machine may be slower or busy
_WORK = (
    1e12  # product of parameters, positions and rows in a client's round; less work takes only seconds on any processor
)
_POSITIONS = 256  # assumed number of positions (patches) of an image


def patience(method: Method[Any], population: Partitioned, spec: RunSpec, notice: Callable[[str], None]) -> float:
    """Return the seconds that a client may take: ``run.timeout``, or more if ``run.extend_timeout`` and steps are slow.

    Args:
        notice: called with a line if a client's round may take longer than ``run.timeout``. The line contains the
            client's number of steps, so it is shown to the operator, but not written into the run directory.
    """
    work = _work(method, population)
    seconds = None if work is None else step_seconds(population.model, *work[:2])
    if work is None or seconds is None:
        return spec.timeout
    expected = seconds * work[2]
    expectation = f"the largest client's round takes about {expected:,.0f} s here, {work[2]:,} steps of {seconds:.2g} s"
    if not spec.extend_timeout:
        if expected > spec.timeout:
            notice(f"run.timeout = {spec.timeout:g}: {expectation}; updates that arrive later are discarded")
        return spec.timeout
    most = spec.timeout + _SLACK * expected
    if _SLACK * expected > spec.timeout:
        notice(f"{expectation}; the server waits up to {most:,.0f} s for a client (set run.timeout for another limit)")
    return most


def _work(method: Method[Any], population: Partitioned) -> tuple[Rows, int, int] | None:
    """Return rows of the largest client, rows per step, and steps per round.

    The result is None if these are unknown, or if the round takes only seconds.
    """
    if population.client_model is None or not isinstance(method, TrainsLocally) or not method.rounds:
        return None
    if method.needs.pooled or population.federated.table.kind == "own":
        return None
    model, size = population.model, max(population.federated.sizes("train"), default=0)
    parameters = sum(p.numel() for p in model.module.parameters())
    passes = method.passes if has(method, Planned, "passes") else method.local.passes
    if parameters * _POSITIONS * size * passes < _WORK:
        return None
    largest = next(c for c, of in population.federated.clients.items() if len(of.train) == size)
    rows = population.data(largest).train
    positions = 1 if "features" in rows.tensors else rows.longest or _POSITIONS
    if not len(rows) or parameters * positions * len(rows) * passes < _WORK:
        return None
    steps = method.local.steps(len(rows)) * passes // method.local.epochs
    return rows, min(method.local.batch_size, len(rows)), steps


def step_seconds(model: Model, rows: Rows, size: int) -> float | None:
    """Return the seconds of a forward and a backward pass on the first ``size`` rows; None if memory is too small."""
    batch, began = rows.batch(range(size)), time.perf_counter()
    model.train_mode()
    try:
        with torch.random.fork_rng(devices=[]):
            model.loss(batch).backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        return None
    finally:
        model.eval_mode()
        for parameter in model.live().values():
            parameter.grad = None
    return time.perf_counter() - began
