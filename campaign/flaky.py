"""A method of which one client in ten fails: for the gate of a thousand rounds."""

from __future__ import annotations

from dataclasses import dataclass

from fedfm import seeds
from fedfm.core.client import Client, Update, on_client
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Flaky(FedAvg):
    """FedAvg; by a coin of its own each client raises in a tenth of the rounds."""

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        if seeds.generator(client.seed, "coin").random() < 0.1:
            raise ConnectionError("as the coin said")
        return super().train(client, w)
