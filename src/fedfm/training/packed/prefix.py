"""Prefixes: a client's rows as inputs of the lowest adapted layer, computed once, and cached while the rows exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedfm.core.rows import Rows
from fedfm.training.local_job import Job
from fedfm.training.packed.attention import Shape
from fedfm.training.packed.net import Net

CAP = 256 << 20  # bytes of the cache of one process; a client that needs more than a quarter is not cached
_ROWS = 32  # rows in one pass through the frozen layers


class Prefix:
    """Packed tokens of one client's rows: row i is ``x[start[i] : start[i] + length[i]]``, length (n,)."""

    def __init__(self, net: Net, rows: Rows) -> None:
        self.net = net
        self.rows: Rows | None = rows
        if rows.tokens is not None:
            self.length = rows.tokens.length
        else:
            self.length = np.full(len(rows), net.positions, dtype=np.int64)
        self.start = np.cumsum(self.length) - self.length
        self.nbytes = int(self.length.sum()) * net.width * 4
        self.x: Tensor | None = None

    def fill(self) -> None:
        """Compute all rows and drop the reference to the rows: a cached value must not keep its key alive."""
        n, rows = len(self.length), self.rows
        assert rows is not None
        orders = [np.arange(i, min(i + _ROWS, n)) for i in range(0, n, _ROWS)]
        if rows.deferred:
            parts = ((part, np.arange(len(part))) for part in rows.parts(orders))
            self.x = torch.cat([self._compute(part, at) for part, at in parts])
        else:
            self.x = torch.cat([self._compute(rows, index) for index in orders])
        self.rows = None

    def put(self, index: np.ndarray, out: Tensor) -> None:
        """Write the tokens of these rows, one row after the other, into ``out`` (n, d)."""
        if self.x is None:
            assert self.rows is not None
            out.copy_(self._compute(self.rows, index))
            return
        length = self.length[index]
        first = np.repeat(self.start[index] - (np.cumsum(length) - length), length)
        torch.index_select(self.x, 0, torch.from_numpy(first + np.arange(len(first))), out=out)

    def _compute(self, rows: Rows, index: np.ndarray) -> Tensor:
        part = rows.take(index).compute()
        shape = Shape(np.full(len(part), self.net.positions) if part.tokens is None else part.tokens.length)
        if part.tokens is not None:
            positions = torch.from_numpy(np.concatenate([np.arange(n) for n in shape.lengths]))
            x = self.net.embed(input_ids=part.tokens.concatenate()[None], position_ids=positions[None])[0]
        else:
            x = self.net.embed(part.tensors["pixel_values"]).flatten(0, 1)
        if self.net.lowest:
            x = torch.nn.functional.pad(x, (0, 0, 0, shape.rows - shape.tokens))
        for layer in self.net.layers[: self.net.lowest]:
            x, _ = layer.forward(x, shape, (), ())
        packed: Tensor = x[: shape.tokens]
        return packed


class PrefixByPart(Prefix):
    """Packed tokens of deferred or augmented images, whose batches come from a stream, each only once."""

    def __init__(self, net: Net, rows: Rows, batches: Iterator[tuple[Rows, np.ndarray]]) -> None:
        super().__init__(net, rows)
        self._batches = batches

    def put(self, index: np.ndarray, out: Tensor) -> None:
        """Write the tokens of the stream's next batch, which is the batch with the rows ``index``."""
        rows, at = next(self._batches)
        out.copy_(self._compute(rows, at))


class Cache:
    """The most recent clients' prefixes, up to :data:`CAP` bytes."""

    def __init__(self) -> None:
        self._by_rows: Any = WeakIdKeyDictionary()  # labels tensor of the rows -> Prefix

    def get(self, net: Net, rows: Rows) -> Prefix:
        """The prefix of these rows; only its size decides whether it is cached."""
        prefix: Prefix | None = self._by_rows.get(rows.labels)
        if prefix is not None and prefix.x is not None and prefix.net is net:
            return prefix
        prefix = Prefix(net, rows)
        if prefix.nbytes <= CAP // 4 and len(rows):
            self._make_room(prefix.nbytes)
            prefix.fill()
            self._by_rows[rows.labels] = prefix
        return prefix

    def of(self, net: Net, job: Job) -> Prefix:
        """The prefix of a job's rows: cached if possible, else a prefix that reads the job's stream of batches."""
        rows = job.client.data.train
        if not rows.augment:
            prefix = self.get(net, rows)
            if prefix.x is not None or not rows.deferred:
                return prefix
        return PrefixByPart(net, rows, job.batches())

    def __len__(self) -> int:
        return len(self._by_rows)

    def _make_room(self, nbytes: int) -> None:
        kept = list(self._by_rows.items())
        total = sum(p.nbytes for _, p in kept)
        for key, old in kept:  # the oldest prefix comes first
            if total + nbytes <= CAP:
                break
            total -= old.nbytes
            del self._by_rows[key]


def takes(rows: Rows) -> bool:
    """Whether the rows can be packed: token vectors of any length above 0, or images."""
    if rows.tokens is not None and not rows.tokens.length.all():
        return False
    return rows.names == ({"pixel_values"} if rows.tokens is None else set())


def split(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of adjacent pieces with these lengths."""
    ends = np.cumsum(lengths).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))
