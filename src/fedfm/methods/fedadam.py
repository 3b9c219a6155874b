"""FedAdam: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021. arXiv:2003.00295, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedfm.core.capabilities import Traits
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.linalg.params import Params
from fedfm.methods._statistics import with_averaged_statistics
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Moments:
    """Server state: the model x and the moving averages m and v of the mean update and its square."""

    x: Params
    m: Params
    v: Params


@dataclass(frozen=True)
class FedAdam(FedAvg):
    """Adam at the server on the mean update Delta_t, without bias correction and with m_0 = 0."""

    traits: ClassVar[Traits] = Traits(
        accepts_stale_updates=True, server_needs_weights_only=True, rows_by_optimiser=True
    )
    state_type: ClassVar[Any] = Moments
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.tau": Paper(0.001),
        "method.v_0": Paper(1e-6, "the paper has tau^2, which changes the denominator by at most tau"),
    }

    server_learning_rate: float = setting(0.01, "eta", gt=0)
    beta_1: float = setting(0.9, "decay of the first moment", ge=0, lt=1)
    beta_2: float = setting(0.99, "decay of the second moment", ge=0, lt=1)
    tau: float = setting(0.001, "adaptivity: added to the square root of the second moment", gt=0)
    v_0: float = setting(0.0, "initial second moment; Algorithm 2 has tau^2", ge=0, finite=True)

    def init(self, fed: Federation) -> Moments:  # type: ignore[override]
        zero = 0.0 * fed.initial
        return Moments(fed.initial, zero, zero.map(lambda v: v + self.v_0 if v.is_floating_point() else v))

    def step(self, fed: Federation, state: Moments, t: int) -> Moments:  # type: ignore[override]
        delta = fed.mean(self.train, of=fed.sample(self.fraction), w=state.x)
        m = self.beta_1 * state.m + (1 - self.beta_1) * delta  # line 10
        v = self.second_moment(state.v, delta)  # line 13
        x = state.x + self.server_learning_rate * m.map(lambda m, v: m / (v.sqrt() + self.tau), v)  # line 15
        return Moments(with_averaged_statistics(fed.model, x, state.x, delta), m, v)

    def second_moment(self, v: Params, delta: Params) -> Params:
        """v_t = beta_2 v_{t-1} + (1 - beta_2) Delta_t^2."""
        return self.beta_2 * v + (1 - self.beta_2) * delta.map(torch.square)

    def params_for(self, state: Moments, client: ClientId) -> Params:  # type: ignore[override]
        return state.x
