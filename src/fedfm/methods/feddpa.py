"""FedDPA: Dual-Personalizing Adapter for Federated Foundation Models.

Yang, Long, Shen, Jiang, Blumenstein. NeurIPS 2024. arXiv:2403.19211, Algorithm 1 (FedDPA-T); ``when = "after"`` is
FedDPA-F. Its client half is the client optimiser ``dual_adapter``, which other methods take as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedfm.core.capabilities import Needs, Personal
from fedfm.core.client import ClientId
from fedfm.core.fields import Paper, setting
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.training import Local
from fedfm.training.personal import DualAdapter

_EVERY = "all averaging methods have the same defaults, so that comparisons are fair"


@dataclass(frozen=True)
class FedDPA(Personal, FedAvg):
    """FedAvg of the global adapter; each client also trains a local adapter, with the global one frozen, and keeps it.

    The output for a row is W x + (1 - a) of the global adapter's output + a of the local one's. In training a = 1/2;
    afterwards a depends on the row's similarity to the client's training rows. ``[method.local]`` with
    ``name = "dual_adapter"`` has more settings.
    """

    needs: ClassVar[Needs] = Needs(adaptations=("lora",))
    paper: ClassVar[Mapping[str, Paper]] = {  # of the authors' code
        "method.local.optimiser": Paper("adamw", _EVERY),
        "method.local.learning_rate": Paper(3e-4, _EVERY),
        "method.local.batch_size": Paper(64, _EVERY),
        "method.local.epochs": Paper(10, _EVERY),
        "method.local.lambda": Paper(0.5),
        "method.local.instances": Paper(5),
        "method.local.to": Paper(
            "global", "otherwise a row similar to the client's rows would get less of the client's adapter"
        ),
        "model.adaptation.rank": Paper(8),
        "model.adaptation.dropout": Paper(0.05, "[model.adaptation] has the same defaults for every method"),
    }

    local: Local = setting(
        DualAdapter(), "dual_adapter; or sgd, adam, adamw for both adapters, with its other defaults"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", DualAdapter.of(self.local))

    def start_models(self, w: Params) -> dict[ClientId, Params]:
        return {"": w}  # the global adapter alone, for comparison

    def validate(self) -> None:
        if not isinstance(self.local, DualAdapter):
            raise InputError(
                'method.local.name: feddpa takes "dual_adapter", "sgd", "adam" or "adamw"', key="method.local.name"
            )
