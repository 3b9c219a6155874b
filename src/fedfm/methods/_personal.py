"""Base of FedALA, FedPer, FedPGP and FedRep: FedAvg in which every client keeps a model that the server never gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedfm.core.capabilities import Personal
from fedfm.core.client import Client, ClientId
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class KeepingFedAvg(Personal, FedAvg):
    """Client i keeps theta_i, the result of its last local training, and the model from which that training started."""

    def keep(self, client: Client, start: Params, theta: Params) -> None:
        """Client half: store both models after the local training."""
        client.memory["start"], client.memory["theta"] = start, theta

    def own(self, client: Client, w: Params) -> Params:
        theta: Params = client.memory.get("theta", w)  # before the first local training it is w
        return theta

    def start_of(self, client: Client, w: Params) -> Params:
        start: Params = client.memory.get("start", w)
        return start

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        return {"": self.params_for(state, "")}  # the name "" stands for clients that were never asked

    def validate(self) -> None:
        if self.local.personal:
            raise InputError(
                "method.local.name: this method gives each client its own model; take a plain optimiser, e.g. sgd",
                key="method.local.name",
            )
