"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan, Aggarwal, Singh, Choudhary. 2019. arXiv:1912.00818, Algorithms 1 and 2; the personalization layers W_P are
the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.capabilities import Needs
from fedfm.core.client import Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.errors import E_TENSORS, ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.methods._personal import KeepingFedAvg
from fedfm.models.layers import body_and_head


@dataclass(frozen=True)
class Base:
    """Server state.

    Attributes:
        w: the shared body W_B, and the head's initial value, which stays unchanged.
        begun: clients that already have their own head.
    """

    w: Params
    begun: tuple[ClientId, ...]


@dataclass(frozen=True)
class FedPer(KeepingFedAvg):
    """FedAvg of the body; every client trains body and head together and never sends its head."""

    state_type: ClassVar[Any] = Base
    needs: ClassVar[Needs] = Needs(adaptations=("full", "lora", "ffa_lora", "top_layers"))

    def init(self, fed: Federation) -> Base:  # type: ignore[override]
        for half, names in zip(("body", "head"), body_and_head(fed.model), strict=True):
            if not any(name in fed.model.live() for name in names):
                raise InputError(
                    f"model.adaptation: no part of this model's {half} is trained, but this method shares the body and "
                    "gives each client its own head: take a classifier with adaptation full, lora or top_layers",
                    key="model.adaptation",
                )
        return Base(fed.initial, ())

    def step(self, fed: Federation, s: Base, t: int) -> Base:  # type: ignore[override]
        cohort, (body, head) = fed.sample(self.fraction), body_and_head(fed.model)
        W_B, none, first = s.w.only(body), Params({}), s.w.only(head)
        begin = each({i: none if i in s.begun else first for i in cohort})
        W_B = W_B + fed.mean(self.train, of=cohort, like=W_B.layout, W_B=W_B, begin=begin)  # W_B <- sum_j gamma_j W_B,j
        lost = {e.client for e in fed.excluded if e.round == t}
        return Base(s.w.replace(W_B), tuple(sorted({*s.begun, *cohort} - (lost - {*s.begun}))))

    @on_client(varying=("begin",))
    def train(self, client: Client, W_B: Params, begin: Params) -> Update:  # type: ignore[override]
        body, head = body_and_head(client.model)
        if {*W_B} != {*body} or not {*begin} <= {*head}:  # with other names the head, or a part of it, would be sent
            raise ClientFault(E_TENSORS, "W_B: expected the tensors of the body, and in begin those of the head")
        W_P = client.memory.get("theta", begin)
        start = Params({name: (W_B if name in W_B else W_P)[name] for name in client.model.names})
        theta = self.update(client, start)
        self.keep(client, start, theta)
        return Update(theta.only(W_B) - W_B, self.weight(client), client.metrics)

    def update(self, client: Client, start: Params) -> Params:
        """Client half: SGD on (W_B, W_P) together."""
        return self.local(client, start)

    def params_for(self, s: Base, client: ClientId) -> Params:  # type: ignore[override]
        return s.w
