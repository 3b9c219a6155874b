"""Geometric median (RFA), by the smoothed Weiszfeld algorithm.

Pillutla, Kakade, Harchaoui. Robust Aggregation for Federated Learning. IEEE Transactions on Signal Processing 2022.
arXiv:1912.13445, Algorithm 2. The objective sum_k alpha_k ||v - x_k|| is weighted by alpha_k = n_k / n. One thing
differs: the search starts at the coordinate-wise median, not at the mean. From the mean, each iteration would reduce
the effect of an enormous update only by a constant factor, but the median excludes such an update. The minimum is the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedfm.aggregation._robust import Robust, blocks, combination, shares
from fedfm.aggregation.median import median
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class GeometricMedian(Robust):
    """The vector with the smallest weighted sum of distances (not squared) to the updates."""

    iterations: int = setting(10, "R, largest number of iterations; they end earlier on convergence", ge=1)
    epsilon: float = setting(1e-6, "nu, the smallest distance: a smaller distance to an update counts as nu", gt=0)

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        alpha, d, beta = shares(weights), distances(x, median), torch.zeros(len(x), dtype=torch.float64)
        for _ in range(self.iterations):
            before, beta = beta, alpha / d.clamp_min(self.epsilon)  # line 3: alpha_k / max(nu, ||v - x_k||)
            beta = beta / beta.sum()  # line 4: v = sum_k beta_k x_k / sum_k beta_k
            if float((beta - before).abs().max()) < 1e-12:
                break
            d = distances(x, partial(torch.matmul, beta))
        return combination(x, beta)


def distances(x: Sequence[Params], v: Callable[[Tensor], Tensor]) -> Tensor:
    """||v - x_k||, (m,). The function ``v`` computes the block (B,) of the vector v from the updates' block (m, B)."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for block in blocks(x):
        total += (block - v(block)).square_().sum(1)
    return total.sqrt()
