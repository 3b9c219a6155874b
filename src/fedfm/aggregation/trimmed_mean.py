"""Coordinate-wise trimmed mean.

Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates. ICML 2018.
arXiv:1803.01498, Definition 2, Algorithm 1 option II. The clients' weights are ignored, because each client states its
own weight. Unlike in the paper, trim * m is rounded up, so that small cohorts are trimmed, too. At least one value of
each coordinate is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedfm.aggregation._robust import Robust, by_coordinate
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of each coordinate without its largest and smallest values."""

    trim: float = setting(0.1, "beta, fraction of the cohort that is left out on each side", gt=0, lt=0.5)

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        m = len(x)
        b = min(math.ceil(self.trim * m - 1e-9), (m - 1) // 2)
        return by_coordinate(x, lambda block: block.sort(0).values[b : m - b].mean(0))

    def least(self) -> int:
        return 3
