"""Job: one client's local training, described; who computes it is decided elsewhere."""

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
    """One client's local training: from w, by this optimiser, with a proximal term and a gradient correction if
    given; ``only`` names the tensors that move, None is all.
    """

    client: Client
    w: Params
    local: Local
    mu: float = 0.0
    correction: Params | None = None
    only: tuple[str, ...] | None = None

    def epochs(self) -> np.ndarray:
        """(E, n): the rows in the order of each epoch, a fresh permutation each from the client's seed."""
        n, rng = len(self.client.data.train), seeds.generator(self.client.seed, "batches")
        if self.local.epochs == 1:
            return rng.permutation(n)[None]
        orders = np.empty((self.local.epochs, n), dtype=np.int64)
        for order in orders:
            order[:] = rng.permutation(n)
        return orders

    def orders(self) -> Iterator[np.ndarray]:
        """Row indexes of every mini-batch in turn."""
        for order in self.epochs():
            for start in range(0, len(order), self.local.batch_size):
                yield order[start : start + self.local.batch_size]
