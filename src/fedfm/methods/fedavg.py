"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. arXiv:1602.05629, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.method import Method
from fedfm.linalg.params import Params
from fedfm.methods._weights import WEIGHTINGS, WORDS, weight_of
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class FedAvg(Method[Params]):
    """Average of the clients' locally trained models, weighted by their numbers of training rows."""

    means: ClassVar[tuple[str, ...]] = ("train",)
    traits: ClassVar[Traits] = Traits(
        accepts_stale_updates=True, server_needs_weights_only=True, rows_by_optimiser=True
    )

    rounds: int = setting(10, "communication rounds; 0 evaluates the initial model", ge=0)
    fraction: float = setting(1.0, "C, the fraction of clients that a round asks", gt=0, le=1)
    weighting: str = setting("size", f"weight of a client in the mean: {WORDS}", choices=WEIGHTINGS)
    local: Local = setting(SGD(), "client optimiser: E, B, eta")

    def init(self, fed: Federation) -> Params:
        return fed.initial

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        cohort = fed.sample(self.fraction)  # S_t
        return w + fed.mean(self.train, of=cohort, w=w)  # w_{t+1} = sum_k n_k/n w^k_{t+1}

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        w_k = self.local(client, w)  # ClientUpdate(k, w_t)
        return Update(w_k - w, self.weight(client), client.metrics)

    def weight(self, client: Client) -> int:
        """Client half: the weight of this client's update in the mean."""
        return weight_of(client, self.weighting)

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w
