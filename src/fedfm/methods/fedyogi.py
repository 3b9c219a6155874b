"""FedYogi: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021. arXiv:2003.00295, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.linalg.params import Params
from fedfm.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam, but the step by which the second moment v changes does not depend on the size of v."""

    traits: ClassVar[Traits] = Traits(
        accepts_stale_updates=True, server_needs_weights_only=True, rows_by_optimiser=True
    )

    def second_moment(self, v: Params, delta: Params) -> Params:
        """v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2), line 14."""
        return v.map(lambda v, d: v - (1 - self.beta_2) * d.square() * (v - d.square()).sign(), delta)
