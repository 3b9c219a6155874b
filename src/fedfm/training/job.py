"""Job: one client's local training, described; who computes it is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.federation import Client
from fedfm.params import Params
from fedfm.training import Local

LINE = 16  # entries in 64 bytes of float32: how MKL sums depends on where in such a line a matrix begins


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


def plan(jobs: Sequence[Job], steps: Sequence[int], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every client's every batch, (K, steps, size): row numbers, labels, and each row's share of the mean.

    Batches are padded with row 0 at share 0.

    Raises:
        ValueError: a client has no labels.
    """
    shape = (len(jobs), max(steps, default=0), size)
    index, labels = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    share = np.zeros(shape, dtype=np.float32)
    for k, job in enumerate(jobs):
        y = job.client.data.train.labels
        if y is None:
            raise ValueError("a head is trained on labelled rows")
        for step, order in enumerate(job.orders()):
            count = len(order)
            index[k, step, :count] = order
            share[k, step, :count] = 1 / count
        if len(y):
            labels[k] = y.numpy()[index[k]]
    return torch.from_numpy(index), torch.from_numpy(labels), torch.from_numpy(share)
