"""Logits of many rows by the packed forward; those of the newest parameters are kept as long as their rows live.

Server and clients judge the same rows with the same parameters: what one of them has computed, the other one in the
same process need not compute again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedfm.core.rows import Rows
from fedfm.training.packed.batch import Batch
from fedfm.training.packed.net import Net
from fedfm.training.packed.prefix import Cache, Prefix

_ENTRIES = 1 << 18  # numbers in one layer's input: what a layer reads and writes then stays in the cache


class Predictor:
    """Logits of a net, batched by the rows alone: their bits depend on the rows and the parameters, on nothing else."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self._cache = Cache()
        self._p = torch.empty(0)  # the parameters (P,) of what is kept
        self._kept: Any = WeakIdKeyDictionary()  # Rows -> (stamp, logits)

    def __call__(self, p: Tensor, rows: Rows) -> Tensor:
        """(n, C) for the trained tensors ``p`` (P,)."""
        if not torch.equal(p, self._p):
            self._p, self._kept = p, WeakIdKeyDictionary()
        stamp = tuple(t._version for t in self.net.outside)
        found = self._kept.get(rows)
        if found is None or found[0] != stamp:
            found = self._kept[rows] = (stamp, self._compute(p, rows))
        return found[1].clone()  # type: ignore[no-any-return]

    def _compute(self, p: Tensor, rows: Rows) -> Tensor:
        net, weights = self.net, [self.net.flat.views(p)]
        # Without frozen layers below, a prefix is the embedding: cheaper to compute than to keep.
        kept = net.lowest and rows.labels is not None
        prefix = self._cache.get(net, rows) if kept else Prefix(net, rows)
        out = torch.empty(len(rows), weights[0][net.head[0]].shape[0])
        for index in batches(prefix.length, max(_ENTRIES // net.width, 1)):
            out[torch.from_numpy(index)] = Batch(net, [prefix], [index], weights, [{}]).logits()
        return out


def batches(length: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Indexes of rows of like length, together at most so many tokens; a row that is longer stands alone."""
    order = np.argsort(length, kind="stable")
    start = total = 0
    for stop, n in enumerate(length[order].tolist()):
        if total + n > tokens and stop > start:
            yield order[start:stop]
            start, total = stop, 0
        total += n
    if len(order):
        yield order[start:]
