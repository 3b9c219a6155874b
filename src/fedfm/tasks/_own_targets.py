"""The base class of tasks with other targets than one class per row: a new linear head predicts them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedfm.tasks.task import LORA, Task

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Batch
    from fedfm.models.network import Network


@dataclass(frozen=True)
class OwnTargetsTask(Task):
    """The loss of a batch is the mean of the losses of its rows."""

    own_targets: ClassVar[bool] = True
    new_head: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    linear_head: ClassVar[bool] = True
    softmax: ClassVar[bool] = False
    compared_by_row: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA)

    def auto_class(self, kind: str) -> str:
        return "ImageClassification" if kind == "image" else "SequenceClassification"

    def peft_type(self, kind: str) -> str | None:
        return None if kind == "image" else "SEQ_CLS"

    def loss(self, model: Network, batch: Batch) -> Tensor:
        return self.row_losses(model, batch)[0].mean()
