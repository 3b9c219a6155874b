"""SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. arXiv:1910.06378, Algorithm 1 with option II.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._statistics import with_averaged_statistics
from fedfm.methods.fedavg import FedAvg
from fedfm.training import SGD, Proximal


@dataclass(frozen=True)
class ScaffoldState:
    """Server state: the model x and the server's control variate c."""

    x: Params
    c: Params


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Control variates correct the clients' drift: each local step follows g(y) - c_k + c. Means are unweighted."""

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, rows_by_optimiser=True)
    state_type: ClassVar[Any] = ScaffoldState

    weighting: str = setting(
        "uniform", "weight of a client in the mean: uniform, as in the paper", choices=("uniform",)
    )
    server_learning_rate: float = setting(1.0, "eta_g", gt=0)

    def init(self, fed: Federation) -> ScaffoldState:  # type: ignore[override]
        return ScaffoldState(fed.initial, 0.0 * fed.initial)

    def step(self, fed: Federation, state: ScaffoldState, t: int) -> ScaffoldState:  # type: ignore[override]
        x, c = state.x, state.c
        cohort = fed.sample(self.fraction)  # S
        like = Params.join(y=x, c=c).layout
        mean = fed.mean(self.train, of=cohort, like=like, x=x, c=c)  # 1/|S| sum (Delta y_k, Delta c_k), line 16
        y = mean.part("y")
        x = with_averaged_statistics(fed.model, x + self.server_learning_rate * y, x, y)  # line 17
        c = c + (fed.heard / len(fed.clients)) * mean.part("c")  # |S|/K, where S are the clients whose update arrived
        return ScaffoldState(x, c)

    @on_client
    def train(self, client: Client, x: Params, c: Params) -> Update:  # type: ignore[override]
        c_k = client.memory.get("c", 0.0 * x)
        y = self.local(client, x, correction=c - c_k)  # y <- y - eta_l (g(y) - c_k + c), line 10
        steps = self.local.steps(len(client.data.train), client.model)
        c_new = c_k - c + (x - y) / (steps * self.local.learning_rate)  # line 12, option II
        client.memory["c"] = c_new
        return Update(Params.join(y=y - x, c=c_new - c_k), 1.0, client.metrics)

    def params_for(self, state: ScaffoldState, client: ClientId) -> Params:  # type: ignore[override]
        return state.x

    def validate(self) -> None:
        plain = isinstance(self.local, SGD) and not isinstance(self.local, Proximal)
        if not plain or self.local.momentum or self.local.weight_decay:  # type: ignore[attr-defined]
            raise InputError(
                "method.local: scaffold's control variates are exact for plain SGD only; "
                'expected name = "sgd" without momentum and weight_decay',
                key="method.local",
            )
