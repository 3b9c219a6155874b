"""What FedALA, FedPer and FedRep share: FedAvg whose clients keep models of their own, which the server never has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.client import Client, ClientId, on_client
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Keeping(FedAvg):
    """Client i keeps theta_i, what its last local pass ended with, and what that pass started from."""

    own_models: ClassVar[bool] = True

    def keep(self, client: Client, start: Params, theta: Params) -> None:
        """Client half, after the local pass."""
        client.memory["start"], client.memory["theta"] = start, theta

    def own(self, client: Client, w: Params) -> Params:
        theta: Params = client.memory.get("theta", w)  # w: it has not been asked yet
        return theta

    def starts(self, state: Any) -> dict[ClientId, Params]:
        return {"": self.params_for(state, "")}  # of clients that were never asked

    @on_client
    def evaluate_start(self, client: Client, w: Params, part: str) -> dict[str, Any]:
        """As :meth:`evaluate`, of what the last local pass started from."""
        return super().evaluate_start(client, client.memory.get("start", w), part)

    def validate(self) -> None:
        super().validate()
        if self.local.personal:
            raise InputError(
                "method.local.name: every client has a model of its own already; take a plain optimiser, e.g. sgd"
            )
