"""Weight initialisation: an averaging method starts from a foundation model, so every client gets that model.

The baseline of FedBaF (arXiv:2410.18352, Section 5): in line 1 of its Algorithm 1 the matched entries of w_0 are those
of the foundation model w_pre, and later rounds mix nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.federation import Federation
from fedfm.core.method import with_model
from fedfm.linalg.params import Params
from fedfm.methods.fedbaf.server_foundation import Around


@dataclass(frozen=True)
class WeightInit(Around):
    """w_0 takes the matched entries of the foundation model, so the first message discloses them to every client."""

    traits: ClassVar[Traits] = Traits(rows_by_optimiser=True)

    def init(self, fed: Federation) -> Any:
        state = self.base.init(fed)
        w_0 = self.base.params_for(state, "")
        tensors = w_0.state()
        for name, (region, p) in self.matching(fed).pieces.items():
            tensors[name][tuple(slice(length) for length in region)] = p
        return with_model(state, w_0, Params(tensors))

    def step(self, fed: Federation, state: Any, t: int) -> Any:
        return self.base.step(fed, state, t)
