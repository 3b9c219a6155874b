"""The base class of tasks whose rows have one class each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from fedfm.tasks.task import Scores, Sums, Task

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Rows
    from fedfm.models.network import Network


@dataclass(frozen=True)
class OneClassTask(Task):
    """Logits (b, C) and one label per row; the loss is their cross-entropy."""

    needs_classes: ClassVar[bool] = True
    one_class_a_row: ClassVar[bool] = True
    linear_head: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "right", "loss": "loss_of_rows"})
    sums: ClassVar[tuple[str, ...]] = ("rows", *row_means.values())
    problem_type: ClassVar[str | None] = "single_label_classification"

    def scores(self, model: Network, rows: Rows, batch_size: int = 64) -> Scores:
        """The scores; ``balanced_accuracy`` and ``macro_f1`` of parts cannot be joined: they need counts by class."""
        from fedfm.models import metrics

        if rows.labels is None or not len(rows):
            return metrics.nothing(n=len(rows))
        return metrics.scores(model.predict(rows, batch_size), rows.labels)

    def scores_of(self, model: Network, rows: Rows, logits: Tensor) -> Scores:
        from fedfm.models import metrics

        return metrics.nothing(n=len(rows)) if rows.labels is None else metrics.scores(logits, rows.labels)

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        found = self.scores_of(model, rows, logits)
        return {name: found[name] for name in self.sums if name in found}
