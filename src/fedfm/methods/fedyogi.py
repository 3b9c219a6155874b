"""FedYogi: Adaptive Federated Optimization.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021. arXiv:2003.00295, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.linalg.params import Params
from fedfm.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam whose second moment changes by a step that does not depend on its own size."""

    rows_by_optimiser: ClassVar[bool] = True
    parameters_alone: ClassVar[bool] = True
    takes_late: ClassVar[bool] = True

    def second_moment(self, v: Params, delta: Params) -> Params:
        """v_t = v_{t-1} - (1 - beta_2) Delta_t^2 sign(v_{t-1} - Delta_t^2), line 14."""
        return v.map(lambda v, d: v - (1 - self.beta_2) * d.square() * (v - d.square()).sign(), delta)
