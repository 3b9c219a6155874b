"""Centralised: one model trained on the pooled rows of all clients. An upper baseline: real silos may not pool rows.

The pooled comparison of McMahan et al., AISTATS 2017, arXiv:1602.05629; Algorithm 1 with a single client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Needs
from fedfm.core.client import POOLED, Client, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Centralised(FedAvg):
    """E epochs per round on the pooled rows: as much computation as all clients of a federated run do together."""

    needs: ClassVar[Needs] = Needs(pooled=True)
    means: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ("train_pooled",)

    weighting: str = setting("size", "unused: nothing is averaged", choices=("size", "uniform"))

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        return fed.ask(self.train_pooled, of=[POOLED], least=1, w=w)[POOLED]  # type: ignore[no-any-return]

    @on_client
    def train_pooled(self, client: Client, w: Params) -> Params:
        return self.local(client, w)
