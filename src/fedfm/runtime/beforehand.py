"""Checks of rows, model and libraries before the first round, so that a mistake costs no client its part in the run.

They compare the columns of feature vectors, compare tokens with the embedding, and compute the model on a few rows.
(The reader has already checked that images and cells can be read.) A fault is refused with its place; a probable
fault is a notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fedfm.core.federation import MAX_NORM
from fedfm.core.libraries import describe, refuse
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.models import lengths
from fedfm.models.families import unwrap
from fedfm.models.first_batch import look
from fedfm.models.kinds import is_ours
from fedfm.models.model import Model
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import TrainsLocally
from fedfm.training.optimisers import joins_last

_FEW = 8  # rows; the loss of the two shortest is computed
_PAIR = 2
_FRAME = 2  # tokens around a text: one before and one after
_WIDE = 1e4  # a column gets a notice if it is this large, and this many times as large as the median column


def check(method: Method[Any], population: Partitioned) -> list[str]:
    """Refuse an experiment that would fail in a client; returns notices about the model.

    Raises:
        InputError: with the file, the row, the client or the key.
    """
    table, model = population.federated.table, population.model_or_none
    rows = _rows(population)
    if table.kind == "features" and len(rows):
        _check_columns(table)
    if isinstance(model, Model) and model.hollow:
        with refuse(f"model.name: {model.spec.name!r} cannot compute texts"), torch.random.fork_rng(devices=[]):
            from fedfm.models import later_words

            later_words.refuse_hollow(model)
    if not isinstance(model, Model) or not population.clients:
        return []
    if lengths.exceeds(model.tools):
        model.prepare(table, rows)
    if population.client_model is None or model.hollow:
        return []
    found = _try(method, population) if table.kind != "own" else []  # federate tries the user's module itself
    if isinstance(method, TrainsLocally) and joins_last(model):
        _try_single(method, population)
    return found


def notices(population: Partitioned) -> list[str]:
    """Notices about feature vectors with a column that is much wider than the others."""
    table = population.federated.table
    if table.kind != "features" or not len(table.inputs):
        return []
    widths = _widths(table)
    usual = max(float(np.median(widths)), 1.0)
    wide = np.flatnonzero(widths > _WIDE * usual)
    if not len(wide):
        return []
    more = f", and {len(wide) - 1} more columns as wide" if len(wide) > 1 else ""
    return [
        f"{table.source}: column x[:, {wide[0]}] has values up to {widths[wide[0]]:.3g}, the median column up to "
        f"{usual:.3g}{more}: it alone determines the steps of training; give it in other units, or set data.scale"
    ]


def _rows(population: Partitioned) -> np.ndarray:
    """All rows that a client or the server reads, each once."""
    parts = [population.federated.test]
    for of in population.federated.clients.values():
        parts += [of.train, of.val, of.test]
    return np.unique(np.concatenate(parts).astype(np.int64))


# --- rows -------------------------------------------------------------------------------------------------------------


def _check_columns(table: Table) -> None:
    widths = _widths(table)
    j = int(widths.argmax())
    if widths[j] > MAX_NORM:
        raise InputError(
            f"{table.source}: column x[:, {j}] has values up to {widths[j]:.3g}, beyond what training in single "
            f"precision allows ({MAX_NORM:g}): give it in other units, leave it out, or set data.scale"
        )


def _widths(table: Table) -> np.ndarray:
    """The largest absolute value of each column (d,)."""
    x: np.ndarray = table.inputs
    widths: np.ndarray = np.maximum(x.max(0), -x.min(0)).astype(np.float64)
    return widths


# --- the model on rows ------------------------------------------------------------------------------------------------


def _try(method: Method[Any], population: Partitioned) -> list[str]:
    """Compute features or a loss on the first client's first rows; returns the notices of :func:`look`."""
    model, table = population.model, population.federated.table
    clients = (population.federated.clients[name] for name in population.clients)
    first = next((of.train[:_FEW] for of in clients if len(of.train)), None)
    if first is None:
        return []
    found: list[str] = []
    with refuse(f"model.name: {model.spec.name!r} cannot compute the rows of {table.source}{_hint(model)}"):
        rows = model.prepare(table, first)
        if not len(rows):
            return []
        if is_ours(model):
            found = look(model, rows)
        else:
            ready = (population.encode or model.encode)(rows.take(range(min(_PAIR, len(rows)))))
            if isinstance(method, TrainsLocally):
                with model.evaluating(), torch.random.fork_rng(devices=[]):
                    model.loss(ready.batch(range(len(ready))))
    if (
        type(model) is Model
        and model.task.texts_a_row == 1
        and rows.tokens is not None
        and model.tools.positions is None
    ):
        _try_long(model, table, _rows(population), rows.tokens[0].tolist())
    return found


def _hint(model: Model) -> str:
    config = getattr(unwrap(model.module), "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return " (an encoder-decoder classifies by its end token, which its tokenizer must write once behind each text)"
    return ""


def _try_long(model: Model, table: Table, rows: np.ndarray, ids: list[int]) -> None:
    """Compute a row as long as the longest one, if the model names no limit."""
    most = model.tools.max_length
    if table.kind == "text" and not model.task.packs(table.kind):  # a token takes a byte at least
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


def _try_single(method: TrainsLocally, population: Partitioned) -> None:
    """Train on one row if a client has or takes only one: batch norm may fail, since one row has no variance."""
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
        more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
        what = "method.local.batch_size = 1" if size == 1 else f"{alone[0]}{more} has one training row"
        raise InputError(
            f"{what}, and the model's batch norm takes its statistics from the rows of a batch ({describe(error)}): "
            + ("take 2 at least" if size == 1 else "give it more rows, or leave it out")
        ) from error
    finally:
        model.eval_mode()
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)


def _statistics(model: Model) -> Iterator[torch.Tensor]:
    """The buffers of batch norm, which a forward pass in training mode changes."""
    norms: Sequence[Any] = [m for m in model.train_too if isinstance(m, _BatchNorm)]
    return (buffer for norm in norms for buffer in norm.buffers())
