"""A torch DataLoader of deferred rows: processes that compute batches before they are needed.

Each batch is computed by one process, from its own rows alone. So its bits do not depend on the number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedfm.core.deferred import Deferred
from fedfm.errors import InputError

AHEAD = 2  # batches that each process prepares in advance


class _Parts(Dataset[dict[str, Tensor] | InputError]):
    """A torch data set: its item at the index (b,) has the deferred arguments of these b rows."""

    def __init__(self, deferred: Mapping[str, Deferred]) -> None:
        self._deferred = deferred

    def __getitem__(self, index: np.ndarray) -> dict[str, Tensor] | InputError:
        try:
            return {name: rows.take(index).compute() for name, rows in self._deferred.items()}
        except InputError as error:  # if it were raised, the loader would put a traceback into its text
            return error


def ahead(deferred: Mapping[str, Deferred], orders: Sequence[np.ndarray]) -> Iterator[dict[str, Tensor]]:
    """Yield the deferred arguments of each batch; ``orders`` has the indexes of the rows of each batch.

    Raises:
        InputError: a row cannot be computed.
    """
    count = min(max(d.loaders for d in deferred.values()), len(os.sched_getaffinity(0)), len(orders))
    loader = DataLoader(
        _Parts(deferred),
        batch_size=None,
        sampler=orders,
        num_workers=count,
        prefetch_factor=AHEAD if count else None,
        multiprocessing_context="fork" if count else None,
        collate_fn=_as_is,  # type: ignore[arg-type] # without batch_size it gets single items
        generator=torch.Generator(),  # else it would draw from the global generator
    )
    for made in loader:
        if isinstance(made, InputError):
            raise made
        yield made


def _as_is(made: dict[str, Tensor] | InputError) -> dict[str, Tensor] | InputError:
    return made
