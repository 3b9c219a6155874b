"""Coordinate-wise median.

Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
arXiv:1803.01498, Definition 1, Algorithm 1 option I. The clients' weights are ignored, because each client states its
own weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedfm.aggregation._robust import Robust, by_coordinate
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class Median(Robust):
    """The median of each coordinate over the clients; for an even number of clients, the mean of the middle two."""

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        return by_coordinate(x, median)


def median(block: Tensor) -> Tensor:
    """The median over the m updates: (m, B) -> (B,)."""
    m, ordered = len(block), block.sort(0).values
    return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2
