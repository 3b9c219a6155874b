"""Zero-shot: the foundation model without any training. The baseline before training.

The classifier of a CLIP-like model is the text encoder's embedding of the class names (Radford et al., ICML 2021,
arXiv:2103.00020, Section 3.1). The classifier of any other model is the untrained head. No Algorithm is cited,
since nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Traits
from fedfm.core.fields import setting
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class ZeroShot(FedAvg):
    """Evaluates the initial model; clients send nothing."""

    means: ClassVar[tuple[str, ...]] = ()
    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True)

    rounds: int = setting(0, "0: nothing is trained", ge=0, le=0, words="0, it trains nothing")
