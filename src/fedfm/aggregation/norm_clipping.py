"""Norm clipping: no update has more influence than a bound allows.

Sun, Kairouz, Suresh, McMahan. Can You Really Backdoor Federated Learning? 2019. arXiv:1911.07963, Section 4. Weights
count as in the plain mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedfm.aggregation._robust import Robust, combination, shares
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class NormClipping(Robust):
    """The weighted mean of x_k min(1, C / ||x_k||); C is a constant, or a multiple of the round's median norm."""

    bound: float | None = setting(None, "C, the largest norm [the median norm times the setting `multiple`]", gt=0)
    multiple: float = setting(1.0, "C in units of the median norm, if `bound` is not set", gt=0)

    def combine(self, weights: Sequence[float], x: Sequence[Params]) -> Params:
        norms = [each.norm() for each in x]
        c = self.multiple * statistics.median(norms) if self.bound is None else self.bound
        clip = torch.tensor([1.0 if n <= c else c / n for n in norms], dtype=torch.float64)
        return combination(x, shares(weights) * clip)
