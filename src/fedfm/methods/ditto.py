"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith. ICML 2021. arXiv:2012.04221, Algorithm 1. Its client half is the client optimiser ``ditto``.
Other methods can use this optimiser, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Personal, Traits
from fedfm.core.client import ClientId
from fedfm.core.fields import setting
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.training import Local
from fedfm.training.personal import DittoOptimiser


@dataclass(frozen=True)
class Ditto(Personal, FedAvg):
    """FedAvg trains w. Each client also trains its own v_k on f_k(v) + lambda/2 ||v - w^t||^2, and keeps it.

    lambda is 0.1 unless ``[method.local]`` with ``name = "ditto"`` sets ``lambda``.
    """

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True)

    local: Local = setting(
        DittoOptimiser(), "ditto, with its lambda; or sgd, adam or adamw, which train both models, with lambda 0.1"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", DittoOptimiser.of(self.local))

    def start_models(self, w: Params) -> dict[ClientId, Params]:
        return {"": w}  # the shared model, for comparison only: no v_k starts from it

    def validate(self) -> None:
        if not isinstance(self.local, DittoOptimiser):
            raise InputError(
                'method.local.name: ditto takes "ditto", "sgd", "adam" or "adamw"; the method has its own proximal '
                "term",
                key="method.local.name",
            )
