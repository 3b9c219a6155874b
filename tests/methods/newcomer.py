"""FedNova and a coordinate-wise median of the changes, written from docs/how-to/add-a-method.md alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedfm import Client, ClientId, Federation, Method, Params, Update, on_client, setting
from fedfm.errors import InputError
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class FedNova(Method[Params]):
    """Normalised averaging (Wang et al., NeurIPS 2020, arXiv:2007.07481), plain SGD at the clients."""

    means: ClassVar[tuple[str, ...]] = ("train",)

    rounds: int = setting(10, "communication rounds", ge=0)
    fraction: float = setting(1.0, "share of the clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(), "client optimiser")

    def validate(self) -> None:
        # d_k = delta_k / tau_k is FedNova's normalisation for plain SGD only.
        if type(self.local) is not SGD or self.local.momentum:
            raise InputError("method.local: FedNova's d_k = delta_k / tau_k is for plain SGD: sgd, momentum 0")

    def init(self, fed: Federation) -> Params:
        return fed.initial

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        d = fed.mean(self.train, of=fed.sample(self.fraction), w=w)  # sum_k p_k d_k
        return w + fed.metrics["tau"] * d  # the mean of tau_k with the same p_k is tau_eff

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        n = len(client.data.train)
        tau = float(self.local.steps(n))
        delta = self.local(client, w) - w
        return Update(delta / tau, n, client.metrics | {"tau": tau})

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w


@dataclass(frozen=True)
class Median(Method[Params]):
    """w + the median, coordinate by coordinate, of the clients' changes."""

    asks: ClassVar[tuple[str, ...]] = ("train",)

    rounds: int = setting(10, "communication rounds", ge=0)
    fraction: float = setting(1.0, "share of the clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(), "client optimiser")

    def init(self, fed: Federation) -> Params:
        return fed.initial

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        replies = fed.ask(self.train, of=fed.sample(self.fraction), w=w)
        deltas = [replies[name].delta for name in sorted(replies)]
        return w + deltas[0].map(_median, *deltas[1:])

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        return Update(self.local(client, w) - w, len(client.data.train), client.metrics)

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w


def _median(*flat: torch.Tensor) -> torch.Tensor:
    """The usual median: the mean of the two middle values where their number is even."""
    ordered = torch.stack(flat).sort(dim=0).values
    k = len(flat)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2
