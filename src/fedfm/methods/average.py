"""Average: One round of Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. arXiv:1602.05629, Algorithm 1 with T = 1. The heads are
trained to convergence. FedPFT's comparison (arXiv:2402.01862, Section 6) calls this "AVG".

A head has weights and bias 0 for a class that its client has not seen, as training from zero would leave them.
So a class that only few clients have gets small weights; the paper shows this weakness of averaging. A class that no
client has seen keeps the weight 0. The server sees only what its aggregator discloses of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.linalg.params import Params
from fedfm.methods._convergence import tell_mean
from fedfm.methods._one_shot import OwnHeads, zeros_for_unseen


@dataclass(frozen=True)
class Average(OwnHeads):
    """The mean of the clients' heads, weighted by their numbers of rows."""

    traits: ClassVar[Traits] = Traits(independent_messages=True)
    means: ClassVar[tuple[str, ...]] = ("train",)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        w = fed.mean(self.train)  # w = sum_k n_k/n w_k
        tell_mean(fed)
        return w

    @on_client
    def train(self, client: Client) -> Update:
        update = self.fit(client)
        return Update(zeros_for_unseen(update.delta), update.weight, update.metrics)
