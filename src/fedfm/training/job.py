"""Job: the description of one client's local training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedfm import seeds
from fedfm.core.client import Client
from fedfm.linalg.params import Params
from fedfm.training.optimisers import Local


@dataclass(frozen=True)
class Job:
    """One client's local training; the fields are the arguments of :meth:`Local.__call__`."""

    client: Client
    w: Params
    local: Local
    mu: float = 0.0
    correction: Params | None = None
    only: tuple[str, ...] | None = None

    def epochs(self) -> np.ndarray:
        """(E, n): the rows in the order of each epoch, a new permutation each from the client's seed."""
        n, rng = len(self.client.data.train), seeds.generator(self.client.seed, "batches")
        return np.array([rng.permutation(n) for _ in range(self.local.epochs)])

    def orders(self) -> Iterator[np.ndarray]:
        """Row indexes of each mini-batch."""
        for order in self.epochs():
            for start in range(0, len(order), self.local.batch_size):
                yield order[start : start + self.local.batch_size]
