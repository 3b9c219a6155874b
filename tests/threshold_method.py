"""A method whose client half fails if a row's first number is above the server's: any code may fail for some rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.method import Method
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class Threshold(Method[Params]):
    """Asks whether any row is above a threshold."""

    rounds: int = setting(3, "T", ge=0)
    how: str = setting("raise", "how it fails", choices=("raise", "weight"))

    state_type = Params
    means = ("train",)
    asks = ()

    def init(self, fed: Federation) -> Params:
        return fed.initial

    def step(self, fed: Federation, state: Params, t: int) -> Params:
        return state + fed.mean(self.train, w=state)

    def params_for(self, state: Params, client: str) -> Params:
        return state

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        n = len(client.data.train)
        if self._above(client, w["head.bias"]):
            if self.how == "raise":
                raise ValueError(f"largest number {client.data.train.tensors['features'].max()}")
            return Update(w - w, 0.0)
        return Update(w - w, float(n))

    def _above(self, client: Client, bias: Tensor) -> bool:
        return bool((client.data.train.tensors["features"][:, 0] > bias[0]).any())


@dataclass(frozen=True)
class Replying(Threshold):
    """The same by single replies."""

    asks = ("reply",)

    @on_client
    def reply(self, client: Client, w: Params) -> int:
        if self._above(client, w["head.bias"]):
            raise ValueError("above")
        return 0
