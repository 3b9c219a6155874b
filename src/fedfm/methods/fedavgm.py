"""FedAvgM: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.

Hsu, Qi, Brown. 2019. arXiv:1909.06335, Section 4 (server momentum on top of Algorithm 1 of FedAvg).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods._statistics import with_averaged_statistics
from fedfm.methods.fedavg import FedAvg

_LATE_MOMENTUM = 0.3  # works well with stale updates in benchmarks/asynchronous.py


@dataclass(frozen=True)
class Momentum:
    """Server state: the model w and the momentum m."""

    w: Params
    m: Params


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """FedAvg with momentum at the server: m <- beta m + Delta, w <- w + eta m."""

    traits: ClassVar[Traits] = Traits(
        accepts_stale_updates=True, server_needs_weights_only=True, rows_by_optimiser=True
    )
    state_type: ClassVar[Any] = Momentum

    server_momentum: float = setting(0.9, "beta", ge=0, lt=1)
    server_learning_rate: float = setting(1.0, "eta", gt=0)

    def staleness_warnings(self) -> list[str]:
        if self.server_momentum <= _LATE_MOMENTUM:
            return []
        return [
            f"asynchronous rounds: with stale updates, server_momentum = {self.server_momentum:g} can make the "
            f"model oscillate; {_LATE_MOMENTUM:g} works well in docs/how-to/slow-silos.md"
        ]

    def init(self, fed: Federation) -> Momentum:  # type: ignore[override]
        return Momentum(fed.initial, 0.0 * fed.initial)

    def step(self, fed: Federation, state: Momentum, t: int) -> Momentum:  # type: ignore[override]
        delta = fed.mean(self.train, of=fed.sample(self.fraction), w=state.w)
        m = self.server_momentum * state.m + delta
        w = state.w + self.server_learning_rate * m
        return Momentum(with_averaged_statistics(fed.model, w, state.w, delta), m)

    def params_for(self, state: Momentum, client: ClientId) -> Params:  # type: ignore[override]
        return state.w
