"""Job: the description of one client's local training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fedfm import seeds
from fedfm.core.client import NO_TERMS, Client, Terms
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training.optimisers import Local, batches, joins_last


@dataclass(frozen=True)
class Job:
    """One client's local training from ``w``."""

    client: Client
    w: Params
    local: Local
    terms: Terms = NO_TERMS

    def epochs(self) -> np.ndarray:
        """(E, n): the row indexes in each epoch's order, permutations from the client's seed."""
        return np.array([*permutations(len(self.client.data.train), self.local.epochs, self.client.seed)])

    def orders(self) -> Iterator[np.ndarray]:
        """Row indexes of each mini-batch."""
        n, joins = len(self.client.data.train), joins_last(self.client.model)
        return mini_batches(n, self.local.batch_size, self.local.epochs, self.client.seed, joins)

    def rates(self) -> Iterator[float]:
        """The learning rate eta of each step of this round."""
        begin, end = self.client.span
        steps = max(self.local.steps(len(self.client.data.train), self.client.model), 1)
        total = round(steps / (end - begin)) if end > begin else steps  # before and after all rounds, begin = end
        edges = [begin + (end - begin) * step / steps for step in range(steps + 1)]
        return (self.local.rate(a, b, total) for a, b in pairwise(edges))

    def batches(self) -> Iterator[tuple[Rows, np.ndarray]]:
        """Each mini-batch as (rows, index into them), with deferred images computed and augmentation applied."""
        rows = self.client.data.train
        if not rows.deferred and not rows.augment:
            return ((rows, index) for index in self.orders())
        from fedfm.training import augmentation

        return augmentation.views(rows, list(self.orders()), self.client.seed, self.local.epochs)


def permutations(n: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """The order (n,) of the rows in each epoch."""
    rng = seeds.generator(seed, "batches")
    return (rng.permutation(n) for _ in range(epochs))


def mini_batches(n: int, batch_size: int, epochs: int, seed: int, joins: bool = False) -> Iterator[np.ndarray]:
    """Row indexes of each mini-batch; each epoch has its own order.

    Args:
        joins: whether a last batch of one row joins the batch before it.
    """
    count = batches(n, batch_size, joins)
    for order in permutations(n, epochs, seed):
        for k in range(count):
            yield order[k * batch_size : (k + 1) * batch_size if k + 1 < count else n]


def over_classes(model: Model, local: Local) -> None:
    """Raise an InputError if ``absent`` is set and the loss is not the cross-entropy of one logit per class."""
    if local.absent != "keep" and not (model.task.classifies_by_head and model.softmax):
        raise InputError(
            f'method.local.absent = "{local.absent}" needs a classifier with cross-entropy, but the task here is '
            f'"{model.task}"; drop it',
            key="method.local.absent",
        )
