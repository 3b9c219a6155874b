"""Base of FedALA, FedPer, FedPGP and FedRep: FedAvg with client models that the server never gets."""

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
    """Client i keeps theta_i, the result of its last local pass, and the start of that pass."""

    def keep(self, client: Client, start: Params, theta: Params) -> None:
        """Client half, after the local pass."""
        client.memory["start"], client.memory["theta"] = start, theta

    def own(self, client: Client, w: Params) -> Params:
        theta: Params = client.memory.get("theta", w)  # w: before the first local pass
        return theta

    def start_of(self, client: Client, w: Params) -> Params:
        start: Params = client.memory.get("start", w)
        return start

    def start_models(self, state: Any) -> dict[ClientId, Params]:
        return {"": self.params_for(state, "")}  # for clients that were never asked

    def validate(self) -> None:
        if self.local.personal:
            raise InputError(
                "method.local.name: this method gives each client its own model; take a plain optimiser, e.g. sgd",
                key="method.local.name",
            )
