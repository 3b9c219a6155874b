"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. arXiv:1812.06127, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._statistics import with_averaged_statistics
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise h_k(v; w^t) = F_k(v) + mu/2 ||v - w^t||^2 (eq. 2, with the norm squared).

    ``server_term`` is from FedBaF's paper (arXiv:2410.18352, Algorithm 1, line 8), which prints
    sum_k p_k w^k - mu (w^k - w_t). This leaves open whether the second term is inside the sum or, literally, after it.
    """

    traits: ClassVar[Traits] = Traits(
        accepts_stale_updates=True, server_needs_weights_only=True, rows_by_optimiser=True
    )

    mu: float = setting(0.01, "weight of the proximal term", ge=0, finite=True)
    server_term: str = setting(
        "none",
        "a proximal term at the server: none, or inside, literal (two readings of FedBaF's line 8)",
        choices=("none", "inside", "literal"),
    )

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        if self.server_term == "none":
            return super().step(fed, w, t)
        delta = fed.mean(self.train, of=fed.sample(self.fraction), w=w)  # sum_k p_k w^k - w_t
        terms = fed.heard if self.server_term == "literal" else 1  # sum_k (w^k - w_t) = |S| delta if p_k = 1/|S|
        return with_averaged_statistics(fed.model, w + (1 - self.mu * terms) * delta, w, delta)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        w_k = self.local(client, w, mu=self.mu)  # argmin_v h_k(v; w^t), inexactly
        return Update(w_k - w, self.weight(client), client.metrics)

    def validate(self) -> None:
        if self.server_term == "literal" and self.weighting != "uniform":
            raise InputError(
                'method.server_term = "literal": the server has no sum of changes if their mean is weighted by size; '
                'expected method.weighting = "uniform"',
                key="method.server_term",
            )
