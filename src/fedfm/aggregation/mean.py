"""The weighted mean, which is the default.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017. arXiv:1602.05629, Algorithm 1. A single client can move the mean without limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedfm.aggregation.base import Aggregator


@dataclass(frozen=True)
class Mean(Aggregator):
    """sum_k n_k x_k / sum_k n_k, as one running sum."""
