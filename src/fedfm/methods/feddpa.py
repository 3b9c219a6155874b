"""FedDPA: Dual-Personalizing Adapter for Federated Foundation Models.

Yang, Long, Shen, Jiang, Blumenstein. NeurIPS 2024. arXiv:2403.19211, Algorithm 1 (FedDPA-T); ``when = "after"`` is
FedDPA-F. The client half is the client optimiser ``dual_adapter``, which other methods can use, too.
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

_EVERY = "every averaging method has the same defaults, so that comparisons are fair"


@dataclass(frozen=True)
class FedDPA(Personal, FedAvg):
    """FedAvg of a global adapter. While it is frozen, each client trains and keeps a local adapter.

    For a row x the output is W x + (1 - a) times the global adapter's output + a times the local adapter's output.
    Training uses a = 1/2. Afterwards the share a depends on the row's similarity to the client's training rows. More
    settings are in ``[method.local]`` with ``name = "dual_adapter"``.
    """

    needs: ClassVar[Needs] = Needs(adaptations=("lora",))
    paper: ClassVar[Mapping[str, Paper]] = {  # settings of the authors' code
        "method.local.optimiser": Paper("adamw", _EVERY),
        "method.local.learning_rate": Paper(3e-4, _EVERY),
        "method.local.batch_size": Paper(64, _EVERY),
        "method.local.epochs": Paper(10, _EVERY),
        "method.local.lambda": Paper(0.5),
        "method.local.instances": Paper(5),
        "method.local.to": Paper(
            "global", "otherwise rows similar to the client's own would use the client's adapter less"
        ),
        "model.adaptation.rank": Paper(8),
        "model.adaptation.dropout": Paper(0.05, "[model.adaptation] has the same defaults for every method"),
    }

    local: Local = setting(
        DualAdapter(),
        "dual_adapter; or sgd, adam or adamw, which train both adapters, with dual_adapter's other defaults",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", DualAdapter.of(self.local))

    def start_models(self, w: Params) -> dict[ClientId, Params]:
        return {"": w}  # for comparison: the global adapter alone

    def validate(self) -> None:
        if not isinstance(self.local, DualAdapter):
            raise InputError(
                'method.local.name: feddpa takes "dual_adapter", "sgd", "adam" or "adamw"', key="method.local.name"
            )
