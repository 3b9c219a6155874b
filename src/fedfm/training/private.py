"""Local training by DP-SGD: heads on features in closed form, every other model by its layers.

Abadi et al. 2016, Algorithm 1 (see :mod:`fedfm.privacy.dp_sgd`): the sum of the batch's clipped row gradients, plus
noise N(0, (z C)^2), over the expected size of a batch. What follows is free: the optimiser, momentum, weight decay, the
proximal term and the correction see no row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.privacy.dp_sgd import Budget, Plan
from fedfm.training import heads
from fedfm.training.job import Job
from fedfm.training.loop import flat_of
from fedfm.training.row_gradients import clipped_sum, factors
from fedfm.training.update_rules import Rule


class Counted:
    """Training rows of which a client half sees the number; the local optimiser alone sees the rows."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> object:
        raise InputError(
            f'privacy.mechanism = "dp_sgd": this client half reads its training rows ({name}) past the private '
            "optimiser; no epsilon covers that"
        )


def hidden(data: ClientData) -> ClientData:
    """The same data with training rows that can only be counted."""
    return ClientData(lambda: Counted(data.train), lambda: data.val, lambda: data.test)  # type: ignore[arg-type,return-value]


def fits(model: Model) -> None:
    """Refuse a model whose rows are not independent of each other.

    Raises:
        InputError: batch norm in training mode.
    """
    if any(not name.startswith("lora_dropout") for name in _mixing(model)):
        raise InputError(
            'privacy.mechanism = "dp_sgd": the statistics of batch norm mix the rows of a batch, so that no gradient '
            "belongs to one row; expected a model with group or layer norm, or adaptation head or lora"
        )


def _mixing(model: Model) -> list[str]:
    norms = torch.nn.modules.batchnorm._BatchNorm
    return [type(m).__name__ for m in model.train_too if isinstance(m, norms)]


def train(jobs: Sequence[Job]) -> list[Params]:
    """Train one job after the other, privately. No loss is told: it would be a figure of the rows."""
    return [_train(job) for job in jobs]


def _train(job: Job) -> Params:
    client, local = job.client, job.local
    private, model = client.private, client.model
    assert private is not None
    rows = private.rows
    n = len(rows)
    client.metrics.pop("loss", None)
    if not n:
        return job.w
    fits(model)
    budget = Budget(private.plan, client, n, local.batch_size, local.steps(n))
    first = budget.unspent
    budget.begin(_start(job))
    model.load(job.w)
    flat = flat_of(model)
    live = {name: p for name, p in model.live().items() if job.only is None or name in job.only}
    place = torch.cat([torch.full((p.numel(),), name in live) for name, p in model.live().items()])
    rule, start = Rule(local, flat.p), flat.p.clone()
    correction = None if job.correction is None else flat.flat(job.correction)
    total_of = _head(model, rows, private.plan.clip_norm) if heads.applies(model) and job.only is None else None
    frozen = _marks(model, live) if first else {}
    model.train_mode()
    # LoRA's dropout draws from torch's global generator: give it this client's own stream.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client.seed)
        for step in range(local.steps(n)):
            total = torch.zeros(int(place.sum()), dtype=torch.float64)
            index = budget.batch(step)
            for at in range(0, len(index), local.batch_size):
                part = index[at : at + local.batch_size]
                total += total_of(part) if total_of else clipped_sum(model, rows, part, private.plan.clip_norm, live)
            g = torch.from_numpy(budget.noisy(total.numpy(), step) / budget.expected)
            flat.g.zero_()
            flat.g[place] = g.to(flat.g)
            if job.mu:
                flat.g.add_(flat.p - start, alpha=job.mu)
            if correction is not None:
                flat.g.add_(correction)
            rule.step(flat.p, flat.g)
            if not place.all():  # weight decay and corrections moved the others
                flat.p[~place] = start[~place]
            if step == 0 and first:
                _check_moved(model, live, job.w, frozen)
    flat.g.zero_()
    model.eval_mode()
    return model.params() if job.only is None else job.w.replace(model.params().only(job.only))


def _start(job: Job) -> bytes:
    """All that the steps depend on besides the rows and the secret."""
    correction = "" if job.correction is None else job.correction.sha256()
    return f"{job.w.sha256()} {job.mu!r} {correction} {job.only} {job.local!r}".encode()
