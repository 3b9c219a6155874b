"""FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large Language Models.

Singhal, Ponkshe, Vepakomma. ACL 2025. arXiv:2410.09432. Algorithm: averaged factors and a residual.

Clients keep nothing between rounds: they are sent the averaged adapter and the sum of all residuals so far, as factors,
so that one that was away has the same weights as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm import lowrank
from fedfm.federation import Client, ClientId, Federation, Update, on_client
from fedfm.lowrank import Factors
from fedfm.methods._exact_lora import ExactLora, Merged, Term, as_factors, as_params, averaged, delta_w, terms
from fedfm.models import lora
from fedfm.params import Params


@dataclass(frozen=True)
class FedExLoRA(ExactLora[Merged]):
    """Factors are averaged, and what the product of means misses of the mean of products goes into the frozen weights.

    All clients have the rank of the model's adaptation: factors of different ranks have no mean.
    """

    state_type: ClassVar[Any] = Merged

    def init(self, fed: Federation) -> Merged:
        lora.need(fed.model)
        return Merged(fed.initial, Params({}), lora.alpha_of(fed.model))

    def step(self, fed: Federation, state: Merged, t: int) -> Merged:
        cohort = fed.sample(self.fraction)
        found = terms(fed, self.train, dict.fromkeys(cohort, state.w), w=state.w, shift=state.shift)
        w = state.w.replace(averaged(found, list(state.w)))  # A-bar, B-bar, and the head's mean
        before = as_factors(state.shift)
        W_0 = {
            path: lowrank.compressed(lowrank.stack([(1.0, before[path]), (1.0, x)] if before else [(1.0, x)]))
            for path, x in residual(found, w, state.alpha).items()
        }
        return Merged(w, as_params(W_0), state.alpha)

    @on_client
    def train(self, client: Client, w: Params, shift: Params) -> Update:
        with lora.shifted(client.model, as_factors(shift)):
            w_k = lora.fit(self.local, client, w)
        return Update(w_k - w, self.weight(client), client.metrics)

    def params_for(self, state: Merged, client: ClientId) -> Params:
        return lora.merged(state.w, as_factors(state.shift), state.alpha)


def residual(found: Sequence[Term], mean: Params, alpha: float) -> dict[str, Factors]:
    """Path -> factors of Delta W_res = sum_k p_k s B_k A_k - s B-bar A-bar, of rank (K + 1) r."""
    product = lora.factors(mean, alpha)
    return {path: lowrank.stack([(1.0, x), (-1.0, product[path])]) for path, x in delta_w(found, alpha).items()}
