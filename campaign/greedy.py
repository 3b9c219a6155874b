"""A method whose one client takes memory without end: for the gate of runs that are out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedfm.core.client import Client, Update, on_client
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Greedy(FedAvg):
    """FedAvg; one client fills the memory before it trains."""

    who: str = field(default="", metadata={"help": "name of the client"})

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        blocks = []
        while client.id == self.who:
            blocks.append(bytes([1]) * (1 << 24))
        return super().train(client, w)
