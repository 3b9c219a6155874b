"""FedProx: Federated Optimization in Heterogeneous Networks.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. arXiv:1812.06127, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfm.errors import InputError
from fedfm.federation import Client, Update, on_client
from fedfm.methods.fedavg import FedAvg
from fedfm.params import Params


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg whose clients minimise h_k(v; w^t) = F_k(v) + mu/2 ||v - w^t||^2 (eq. 2), the norm squared."""

    mu: float = field(default=0.01, metadata={"help": "weight of the proximal term"})

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        w_k = self.local(client, w, mu=self.mu)  # argmin_v h_k(v; w^t), inexactly
        n_k = len(client.data.train) if self.weighting == "size" else 1
        return Update(w_k - w, n_k, client.metrics)

    def validate(self) -> None:
        super().validate()
        if self.mu < 0:
            raise InputError(f"method.mu = {self.mu}: expected a number of at least 0")
