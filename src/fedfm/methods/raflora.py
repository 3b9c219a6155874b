"""raFLoRA: Preventing Rank Collapse in Federated Low-Rank Adaptation with Client Heterogeneity.

Wu, Hu, Min, Wang. 2026. arXiv:2602.13486. Algorithm: rank-partitioned aggregation, as the abstract describes it.

The distinct ranks r_1 < r_2 < ... of the clients cut an adapter into partitions. Partition h is made of the columns
r_{h-1} + 1 to r_h of B and the same rows of A. The clients M_h hold it, which are those of rank r_h or more:

    Delta W = sum_h sum_{k in M_h} (p_k / sum_{j in M_h} p_j) s_k B_k^h A_k^h

FlexLoRA divides by sum_j p_j = 1 in every partition. So if clients do not train, it multiplies partition h by the
weight of M_h in each round, and here Delta W stays as it is. With equal ranks both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import ClientId
from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import Term
from fedfm.methods.flexlora import FlexLoRA
from fedfm.models.adapters import lora


@dataclass(frozen=True)
class RaFLoRA(FlexLoRA):
    """FlexLoRA, but each rank partition of Delta W is the mean over the clients that hold it."""

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True)

    def aggregate(self, found: Sequence[Term], ranks: Sequence[int], w: Params, alpha: float) -> dict[str, Factors]:
        return partition_mean(found, ranks, w, alpha)

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        return []


def partition_mean(found: Sequence[Term], ranks: Sequence[int], w: Params, alpha: float) -> dict[str, Factors]:
    """For each module, factors of Delta W = sum_h sum_{k in M_h} (p_k / sum_{j in M_h} p_j) s_k B_k^h A_k^h.

    A partition that nobody in the cohort holds keeps the server's value. The abstract does not say what becomes of it.

    Args:
        found: the cohort's terms, with p_k that sum to 1.
        ranks: the distinct ranks of all clients, ascending; they bound the partitions.
        w: the server's adapter, from which the cohort started, of rank at least max(ranks).
    """
    products = [(term.p, lora.factors(term.w, alpha)) for term in found]
    out = dict[str, Factors]()
    for path, own in lora.factors(w, alpha).items():
        parts = list[tuple[float, Factors]]()
        for low, high in pairwise((0, *ranks)):
            M_h = [(p, x[path]) for p, x in products if len(x[path][1]) >= high] or [(1.0, own)]
            total = sum(p for p, _ in M_h) if len(M_h) < len(products) else 1.0  # exactly, for FlexLoRA's bits
            parts += [(p / total, (u[:, low:high], v[low:high])) for p, (u, v) in M_h]
        out[path] = low_rank.stack(parts)
    return out
