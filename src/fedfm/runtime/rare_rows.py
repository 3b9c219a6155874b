"""Try the model on unusual inputs that only some clients may have: a batch of one row, and the longest text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedfm.core.libraries import describe, refuse
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models.model import Model
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import TrainsLocally

_FRAME = 2  # number of special tokens around a text


def try_long(model: Model, table: Table, rows: np.ndarray, ids: list[int]) -> None:
    """Refuse a model that fails on ``model.max_length`` tokens, or on the longest row if all rows are shorter."""
    most = model.tools.max_length
    if table.kind == "text" and not model.task.packs(table.kind):  # a text has at most one token per byte
        most = min(most, max(len(table.inputs[i].encode("utf-8", "replace")) for i in rows) + _FRAME)

    def compute(length: int) -> None:
        long = [*ids[:-1], *ids[-2:-1] * max(length - len(ids), 0), *ids[-1:]][:length]
        with model.evaluating(), torch.random.fork_rng(devices=[]):
            model.logits(Rows(tokens=Tokens.of([long])).batch([0]))

    try:
        compute(most)
    except (RuntimeError, IndexError, ValueError):
        longest = model.prepare(table, rows).longest
        with refuse(f"model.max_length = {model.tools.max_length}: {model.spec.name!r} fails on {longest} tokens"):
            compute(longest)


def try_single(method: TrainsLocally, population: Partitioned) -> None:
    """Refuse a batch of one row if the model's batch norm cannot compute a variance from one row.

    Such a batch occurs if a client has one training row, or if ``method.local.batch_size`` is 1.
    """
    model, size = population.model, method.local.batch_size
    clients = population.federated.clients
    alone = [
        name for name in population.clients if len(clients[name].train) == 1 or (size == 1 and clients[name].train.size)
    ]
    if not alone:
        return
    batch = model.prepare(population.federated.table, clients[alone[0]].train[:1]).batch([0])
    kept = [(t, t.clone()) for t in _statistics(model)]
    model.train_mode()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.loss(batch)
    except ValueError as error:
        more = f"and {len(alone) - 1} more have one training row each" if len(alone) > 1 else "has one training row"
        them = "these clients" if len(alone) > 1 else "this client"
        what = "method.local.batch_size = 1" if size == 1 else f"{alone[0]} {more}"
        raise InputError(
            f"{what}, and the model's batch norm computes its statistics over the rows of a batch ({describe(error)}): "
            + ("take at least 2" if size == 1 else f"give {them} more rows, or leave {them} out")
        ) from error
    finally:
        model.eval_mode()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _statistics(model: Model) -> Iterator[torch.Tensor]:
    """Return the running statistics of batch norm, which a forward pass in training mode changes."""
    norms: Sequence[Any] = [m for m in model.train_too if isinstance(m, _BatchNorm)]
    return (buffer for norm in norms for buffer in norm.buffers())
