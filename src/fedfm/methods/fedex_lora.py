"""FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models.

Singhal, Ponkshe, Vepakomma. ACL 2025. arXiv:2410.09432. Algorithm: average the factors, and add the residual.

Clients keep nothing between rounds. They receive the averaged adapter, and the factors of the sum of all residuals so
far. So a client that was absent has the same weights as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.params import Params
from fedfm.methods._lora_products import Merged, Merging, Term, add, as_factors, average, delta_w, terms
from fedfm.models.adapters import lora
from fedfm.training import any_rank


@dataclass(frozen=True)
class FedExLoRA(Merging):
    """The factors A and B are averaged. The frozen weights get the mean of products minus the product of means.

    The paper has one rank for all clients. With different ranks, the mean pads smaller factors with zeros. A client of
    a smaller rank gets the rest of the averaged adapter in its frozen weights, so all clients start from one model.
    """

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True)

    def step(self, fed: Federation, state: Merged, t: int) -> Merged:
        r = self.ranks_of(fed)
        starts = {k: lora.first(state.w, r[k]) for k in fed.sample(self.fraction)}
        shifts = {rank: frozen_part(state, rank) for rank in {r[k] for k in starts}}
        found = terms(fed, self.train, starts, w=each(starts), shift=each({k: shifts[r[k]] for k in starts}))
        wide = [Term(p, lora.widen(w_k, state.w.layout)) for p, w_k in found]
        w = state.w.replace(average(wide, list(state.w)))  # A-bar, B-bar, and the head's mean
        W_0 = add(state.shift, residual(found, w, state.alpha))
        return Merged(w, W_0, state.alpha)

    @on_client
    def train(self, client: Client, w: Params, shift: Params) -> Update:
        with lora.shift_weights(client.model, as_factors(shift)):
            w_k = any_rank.fit(self.local, client, w)
        return Update(w_k - w, self.weight(client), client.metrics)


def frozen_part(state: Merged, rank: int) -> Params:
    """The change of the frozen weights of a client with this rank.

    It is W_res of all rounds plus the part of the averaged adapter from row and column ``rank`` on.
    """
    rest = {path: (u[:, rank:], v[rank:]) for path, (u, v) in lora.factors(state.w, state.alpha).items()}
    if not any(bool(u.any()) for u, _ in rest.values()):
        return state.shift
    return add(state.shift, rest)


def residual(found: Sequence[Term], mean: Params, alpha: float) -> dict[str, Factors]:
    """For each module, factors of Delta W_res = sum_k p_k s B_k A_k - s B-bar A-bar, of rank (K + 1) r."""
    product = lora.factors(mean, alpha)
    return {path: low_rank.stack([(1.0, x), (-1.0, product[path])]) for path, x in delta_w(found, alpha).items()}
