"""Local: every client trains alone, for the same number of epochs as in a federated run. The lower baseline.

Named "local training" in McMahan et al., AISTATS 2017, arXiv:1602.05629; Algorithm 1 without its communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.capabilities import Personal, Traits
from fedfm.core.client import Client, ClientId, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class LocalOnly(Personal, FedAvg):
    """Nothing is averaged: client k continues from its own model each round."""

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, rows_by_optimiser=True)
    means: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ("train_alone",)
    state_type: ClassVar[Any] = dict[str, Params]

    weighting: str = setting("size", "unused: nothing is averaged", choices=("size", "uniform"))

    def init(self, fed: Federation) -> dict[ClientId, Params]:  # type: ignore[override]
        return dict.fromkeys(fed.clients, fed.initial)

    def step(self, fed: Federation, w: dict[ClientId, Params], t: int) -> dict[ClientId, Params]:  # type: ignore[override]
        fed.cohort = tuple(fed.sample(self.fraction))
        # A client that trains alone sends nothing. These messages only let this program store the client's model, so
        # they are listed but not counted.
        return w | fed.ask(self.train_alone, of=fed.cohort, counted=False, like=fed.initial.layout, w=each(w))

    @on_client
    def train_alone(self, client: Client, w: Params) -> Params:
        return self.local(client, w)

    def params_for(self, w: dict[ClientId, Params], client: ClientId) -> Params:  # type: ignore[override]
        return w[client]
