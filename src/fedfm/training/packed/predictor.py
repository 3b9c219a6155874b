"""Logits of many rows by the packed forward pass, with a cache for the newest parameters.

Server and clients evaluate the same rows with the same parameters; in one process, the second evaluation uses the
cache.
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
from fedfm.training.packed.prefix import Cache, Prefix, PrefixByPart

_ENTRIES = 1 << 18  # number of values in a layer's input; then input and output fit the processor's cache


class CachedLogits:
    """Logits of a net. Batches depend only on the rows, so equal rows and parameters give bit for bit equal logits."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self._cache = Cache()
        self._p = torch.empty(0)  # the parameters (P,) of the cached logits
        self._kept: Any = WeakIdKeyDictionary()  # Rows -> (stamp, logits)

    def __call__(self, p: Tensor, rows: Rows) -> Tensor:
        """Logits (n, C) for the trained tensors ``p`` (P,)."""
        if not torch.equal(p, self._p):
            self._p, self._kept = p, WeakIdKeyDictionary()
        stamp = tuple(t._version for t in self.net.outside)
        found = self._kept.get(rows)
        if found is None or found[0] != stamp:
            found = self._kept[rows] = (stamp, self._compute(p, rows))
        return found[1].clone()  # type: ignore[no-any-return]

    def _compute(self, p: Tensor, rows: Rows) -> Tensor:
        net, weights = self.net, [self.net.flat.views(p)]
        # Without frozen layers at the bottom, a prefix is only the embedding, which is cheap to compute again.
        kept = net.lowest and rows.labels is not None
        prefix = self._cache.get(net, rows) if kept else Prefix(net, rows)
        out = torch.empty(len(rows), weights[0][net.head[0]].shape[0])
        orders = list(batches(prefix.length, max(_ENTRIES // net.width, 1)))
        if rows.deferred and prefix.x is None:
            prefix = PrefixByPart(net, rows, ((part, np.arange(len(part))) for part in rows.parts(orders)))
        for index in orders:
            out[torch.from_numpy(index)] = Batch(net, [prefix], [index], weights, [{}]).logits()
        return out


def batches(length: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Indexes of rows of similar length, with at most ``tokens`` per batch; a longer row is a separate batch."""
    order = np.argsort(length, kind="stable")
    start = total = 0
    for stop, n in enumerate(length[order].tolist()):
        if total + n > tokens and stop > start:
            yield order[start:stop]
            start, total = stop, 0
        total += n
    if len(order):
        yield order[start:]
