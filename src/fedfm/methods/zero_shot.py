"""Zero-shot: the foundation model as it is, without a round of training. The baseline at the start.

For a CLIP-like model the classifier is the text encoder's view of the class names (Radford et al., ICML 2021,
arXiv:2103.00020, Section 3.1); for others it is the untrained head. No Algorithm: nothing is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.fields import setting
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class ZeroShot(FedAvg):
    """Evaluates the start; sends nothing."""

    means: ClassVar[tuple[str, ...]] = ()

    rounds: int = setting(0, "0: nothing is trained", ge=0, le=0, words="0, it trains nothing")
