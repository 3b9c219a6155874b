"""FedRep: Exploiting Shared Representations for Personalized Federated Learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. arXiv:2102.07078, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from fedfm.core.capabilities import Planned
from fedfm.core.client import Client
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedper import FedPer
from fedfm.models.layers import body_and_head
from fedfm.training import Local


@dataclass(frozen=True)
class FedRep(Planned, FedPer):
    """FedPer whose clients train in two phases: first the head on the frozen body, then the body with a frozen head."""

    weighting: str = setting(
        "uniform", "weight of a client in the mean: uniform (the paper) or size", choices=("size", "uniform")
    )
    head_epochs: int = setting(10, "tau, epochs of the head with a frozen body; local.epochs are the body's", ge=1)

    def update(self, client: Client, start: Params) -> Params:
        body, head = body_and_head(client.model)
        first = self.of_head(client, start, only=head)  # h_i <- GRD(f_i(h_i, phi), h_i, alpha), tau times
        return self.local(client, first, only=body)  # phi_i <- GRD(f_i(h_i, phi), phi, alpha)

    @cached_property
    def of_head(self) -> Local:
        """The client optimiser with the head's number of epochs."""
        return replace(self.local, epochs=self.head_epochs)

    @property
    def passes(self) -> int:
        """Epochs of a round: of the head (on the frozen body), and of the body."""
        return self.head_epochs + self.local.passes
