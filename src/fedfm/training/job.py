"""Job: one client's local training, described; who computes it is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedfm import seeds
from fedfm.federation import Client
from fedfm.params import Params
from fedfm.training import Local


@dataclass(frozen=True)
class Job:
    """One client's local training: from w, by this optimiser, with a proximal term and a gradient correction if
    given.
    """

    client: Client
    w: Params
    local: Local
    mu: float = 0.0
    correction: Params | None = None

    def orders(self) -> Iterator[np.ndarray]:
        """Row indexes of every mini-batch in turn: each epoch a fresh permutation from the client's seed."""
        n, size = len(self.client.data.train), self.local.batch_size
        rng = seeds.generator(self.client.seed, "batches")
        for _ in range(self.local.epochs):
            order = rng.permutation(n)
            for start in range(0, n, size):
                yield order[start : start + size]
