"""Check rows, model and libraries before the first round. Otherwise a mistake would exclude clients during the run.

The checks compare the columns of feature vectors with each other, compare tokens with the size of the embedding, and
compute the model on a few rows. (The reader has already checked that images and cells can be read.) A mistake raises
an error that names its place. A probable mistake gives a notice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fedfm.core.libraries import refuse
from fedfm.core.method import Method
from fedfm.data.table import PARTS
from fedfm.errors import InputError
from fedfm.models.families import unwrap
from fedfm.models.first_batch import look
from fedfm.models.model import Model
from fedfm.models.model_kinds import is_ours
from fedfm.runtime.partitioned import Partitioned
from fedfm.training import TrainsLocally
from fedfm.training.optimisers import joins_last

_FEW = 8  # number of rows that are checked; the loss is computed for the two shortest rows
_PAIR = 2


def check(method: Method[Any], population: Partitioned) -> list[str]:
    """Refuse an experiment that would fail at a client; return notices about the model.

    Raises:
        InputError: the experiment would fail; the error names the file, the row, the client or the key.
    """
    table, model = population.federated.table, population.model_or_none
    rows = _rows(population)
    if table.kind == "features" and len(rows):
        from fedfm.runtime.feature_columns import check_columns

        check_columns(table)
    none = population.clients and not population.federated.sizes("val").any()
    if none and isinstance(model, Model) and (key := model.task.needs_validation):
        raise InputError(f"{key} needs validation rows: set data.val_fraction, e.g. 0.1, or mark rows as val")
    if isinstance(model, Model) and model.hollow:
        with refuse(f"model.name: {model.spec.name!r} fails on texts"), torch.random.fork_rng(devices=[]):
            from fedfm.models import later_words

            later_words.refuse_hollow(model)
    if not isinstance(model, Model) or not population.clients:
        return []
    if model.tools.tokenizer is not None:
        from fedfm.models import lengths

        if lengths.exceeds(model.tools):
            model.prepare(table, rows)
    if table.kind == "image" and model.tools.image is not None and not isinstance(table.inputs, np.ndarray):
        from fedfm.models import picture_sizes

        picture_sizes.check(table.inputs, rows, model.tools.image, table.source)
    if population.client_model is None or model.hollow:
        return []
    found = _try(method, population) if table.kind != "own" else []  # federate() has tried the user's module already
    if isinstance(method, TrainsLocally) and joins_last(model):
        from fedfm.runtime.rare_rows import try_single

        try_single(method, population)
    return found


def notices(population: Partitioned) -> list[str]:
    """Return notices about feature vectors if one column, or one client, has much larger values than the others."""
    if population.federated.table.kind != "features":
        return []
    from fedfm.runtime import feature_columns

    return feature_columns.notices(population)


def _rows(population: Partitioned) -> np.ndarray:
    """Return the indices of all rows that a client or the server reads, each once."""
    parts = [population.federated.test, *map(population.federated.all_rows, PARTS)]
    return np.unique(np.concatenate(parts).astype(np.int64))


# --- the model on rows ------------------------------------------------------------------------------------------------


def _try(method: Method[Any], population: Partitioned) -> list[str]:
    """Compute features or a loss on the first rows of the first client; return the notices of :func:`look`."""
    model, table = population.model, population.federated.table
    clients = (population.federated.clients[name] for name in population.clients)
    first = next((of.train[:_FEW] for of in clients if len(of.train)), None)
    if first is None:
        return []
    found: list[str] = []
    with refuse(f"model.name: {model.spec.name!r} fails on the rows of {table.source}{_hint(model)}"):
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
        from fedfm.runtime.rare_rows import try_long

        try_long(model, table, _rows(population), rows.tokens[0].tolist())
    return found


def _hint(model: Model) -> str:
    config = getattr(unwrap(model.module), "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return " (an encoder-decoder classifies at its end token, so its tokenizer must write one end token per text)"
    return ""
