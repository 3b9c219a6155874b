"""FlexLoRA: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources.

Bai, Chen, Qian, Yao, Li. NeurIPS 2024. arXiv:2402.11505. Algorithm: the full Delta W, and its SVD for each client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Judge, Traits
from fedfm.core.client import Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import ExactLora, Term, average, delta_w, terms
from fedfm.models.adapters import lora
from fedfm.training import any_rank

ENERGY = "energy_above_least_rank"  # share of ||Delta W||_F^2 in the singular values after the clients' smallest rank


@dataclass(frozen=True)
class Cut:
    """Server state.

    Attributes:
        w: Delta W truncated to the model's rank, and the head if it is trained.
        error: for each rank the sum over modules of ||Delta W - its truncation||_F^2 in the last round.
        energy: sum over modules of ||Delta W||_F^2.
    """

    w: Params
    error: dict[str, float]
    energy: float


@dataclass(frozen=True)
class FlexLoRA(ExactLora[Cut]):
    """The exact Delta W is truncated by its SVD to each client's rank; the result has the largest rank.

    Only clients of a larger rank hold the directions above the smallest rank, but Delta W weighs these directions as
    if all clients held them. So their energy falls from round to round.
    """

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True)
    figures: ClassVar[tuple[str, ...]] = (ENERGY,)

    def init(self, fed: Federation) -> Cut:
        self.ranks_of(fed)
        return Cut(fed.initial, {}, 0.0)

    def step(self, fed: Federation, state: Cut, t: int) -> Cut:
        r = self.ranks_of(fed)
        starts = {k: lora.first(state.w, r[k]) for k in fed.sample(self.fraction)}
        found = terms(fed, self.train, starts, w=each(starts))
        dW = self.aggregate(found, sorted({*r.values()}), state.w, lora.alpha_of(fed.model))
        adapter, sigma = cut(dW, state.w, lora.alpha_of(fed.model))
        w = state.w.replace(adapter | average(found, lora.rest(state.w)))
        error = {rank: truncation_error(sigma, rank) for rank in sorted({*r.values()})}
        energy = truncation_error(sigma, 0)
        fed.metrics[ENERGY] = error[min(error)] / energy if energy else 0.0
        return Cut(w, {str(rank): e for rank, e in error.items()}, energy)

    def aggregate(self, found: Sequence[Term], ranks: Sequence[int], w: Params, alpha: float) -> dict[str, Factors]:
        """For each module Delta W = sum_k p_k s_k B_k A_k as factors, from the cohort's terms.

        Args:
            ranks: the distinct ranks of all clients, ascending.
            w: the server's adapter, from which the cohort started.
        """
        return delta_w(found, alpha)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        return Update(any_rank.fit(self.local, client, w) - w, self.weight(client), client.metrics)

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        if len({*self.ranks}) < 2:
            return []
        return [
            f"method.ranks = {list(self.ranks)}: each mean shrinks what was learned above rank {min(self.ranks)}, "
            "since clients of smaller ranks count as zero there; raflora keeps it"
        ]

    def params_for(self, state: Cut, client: ClientId) -> Params:
        return state.w

    def details(self, state: Cut, judge: Judge | None) -> dict[str, Any]:
        """The last truncation's squared Frobenius error by rank, and the error's share of Delta W's squared norm."""
        share = {r: e / state.energy if state.energy else 0.0 for r, e in state.error.items()}
        return {"cut": {"squared_error": dict(state.error), "share": share}}


def cut(dW: Mapping[str, Factors], like: Params, alpha: float) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Delta W = U S V^T by module; B = U S / s and A = V^T at the rank r of ``like``, s = alpha / r.

    Returns:
        (the factors A (r, d_in) and B (d_out, r) by name, the singular values of each module).
    """
    found, sigma = dict[str, Factors](), []
    for path, (a, _) in lora.matrices(like).items():
        r = len(a)
        x, values = low_rank.truncate(dW[path], r)
        u, v = low_rank.pad(x, r)
        # If the cohort's ranks are small, Delta W may have a rank below r. Fill A with orthonormal rows, since zero
        # rows of A and zero columns of B would never train.
        if (k := len(x[1])) < r:
            whole = torch.linalg.qr(torch.cat([x[1].T, a.double().T], 1)[:, :r])[0].T  # (min(r, d_in), d_in)
            v[k : len(whole)] = whole[k:]
        found[path] = v, u * (r / alpha)
        sigma.append(values)
    return lora.assemble(found, like), sigma


def truncation_error(sigma: Sequence[Tensor], rank: int) -> float:
    """Sum over modules of squared singular values after the first ``rank``: the least error (Eckart and Young 1936)."""
    return sum(float(values[rank:].square().sum()) for values in sigma)
