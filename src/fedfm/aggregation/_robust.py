"""Base class of the robust rules. They keep all updates of a cohort in memory, and work on blocks of coordinates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfm.aggregation.base import Aggregator
from fedfm.core.client import Update
from fedfm.core.federation import Federation
from fedfm.errors import RunError
from fedfm.linalg.params import Params

_ENTRIES = 1 << 20  # number of entries of all clients together in one block
_LEAST = 1024  # smallest number of coordinates of a block, for any number of clients


@dataclass(frozen=True)
class Robust(Aggregator):
    """A rule that needs all updates x_1 ... x_m at once, so the server's memory grows by one update for each client.

    The rule reads every update in the clear, so it does not work with a transport that hides updates.
    """

    def reduce(self, fed: Federation, updates: Iterator[Update]) -> Params:
        """Apply the rule.

        Raises:
            RunError: fewer updates arrived than the rule needs.
        """
        received = list(updates)
        if len(received) < self.least():
            raise RunError(f"round {fed.round}: {len(received)} updates arrived, but {self} needs {self.least()}")
        return self.combine([u.weight for u in received], [u.delta for u in received])

    @abstractmethod
    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        """Combine m updates with equal layouts into one."""


def by_coordinate(x: Sequence[Params], rule: Callable[[Tensor], Tensor]) -> Params:
    """Apply ``rule`` to blocks of coordinates: (m, B) float64 -> (B,). Integer entries are those of x_1."""
    flats = dict(x[0].flats)
    for dtype, like in x[0].flats.items():
        if dtype.is_floating_point:
            flats[dtype] = torch.empty_like(like)
            for part, block in _blocks(x, dtype):
                flats[dtype][part] = rule(block).to(dtype)
    return Params.from_flat(x[0].layout, flats)


def blocks(x: Sequence[Params]) -> Iterator[Tensor]:
    """All floating-point coordinates in blocks (m, B), float64."""
    for dtype in x[0].flats:
        if dtype.is_floating_point:
            for _, block in _blocks(x, dtype):
                yield block


def _blocks(x: Sequence[Params], dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    size, length = max(_ENTRIES // len(x), _LEAST), x[0].layout.sizes[dtype]
    for start in range(0, length, size):
        part = slice(start, min(start + size, length))
        yield part, torch.stack([each.flats[dtype][part] for each in x]).double()


def combination(x: Sequence[Params], beta: Tensor) -> Params:
    """sum_k beta_k x_k for beta (m,) float64, summed in float64."""
    return by_coordinate(x, lambda block: beta @ block)


def shares(weights: Sequence[float]) -> Tensor:
    """alpha_k = n_k / sum_j n_j, (m,) float64."""
    a = torch.tensor(weights, dtype=torch.float64)
    return a / a.sum()


def squared_distances(x: Sequence[Params]) -> Tensor:
    """||x_i - x_j||^2, (m, m), float64.

    They are computed from differences: with inner products, one update of enormous norm would make the distances of
    all others inexact.
    """
    d = torch.zeros(len(x), len(x), dtype=torch.float64)
    for block in blocks(x):
        for i in range(len(x) - 1):
            d[i, i + 1 :] += (block[i + 1 :] - block[i]).square_().sum(1)
    return d + d.T
