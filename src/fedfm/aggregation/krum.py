"""Krum: the one update whose neighbours are nearest.

Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent.
NIPS 2017. arXiv:1703.02757, Section 4. The clients' weights are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedfm.aggregation._robust import Robust, squared_distances
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class Krum(Robust):
    """The update x_i with the smallest score s(i) = sum of ||x_i - x_j||^2 over its m - f - 2 nearest x_j."""

    byzantine: int = setting(1, "f, largest number of attackers in a cohort; the rule needs 2f + 3 updates", ge=1)

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        return x[int(scores(squared_distances(x), self.byzantine).argmin())]  # in a tie the first in order of names

    def least(self) -> int:
        return 2 * self.byzantine + 3


def scores(d: Tensor, f: int) -> Tensor:
    """s(1) ... s(m) from squared distances (m, m). The smallest, each update's distance to itself, is left out."""
    return d.sort(1).values[:, 1 : len(d) - f - 1].sum(1)
