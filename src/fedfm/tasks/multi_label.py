"""Several labels a row, or none: a new head gives each label a probability of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks.task import LORA, Column, Scores, Sums, Task, Trained

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.row_targets import FigureTable, RowTargets
    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

BY_LABEL = ("rows_by_label", "f1_by_label", "auroc_by_label", "average_precision_by_label")


@dataclass(frozen=True)
class MultiLabel(Task):
    """Logits (b, C); the loss is the binary cross-entropy, a mean over rows and labels."""

    name: ClassVar[str] = "multi_label"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("label_separator", 'text between the names of a row\'s labels in one cell, task "multi_label"', ";"),
    )
    own_targets: ClassVar[bool] = True
    absent_target: ClassVar[float | None] = 0.0
    new_head: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    linear_head: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA)
    figures: ClassVar[tuple[str, ...]] = ("micro_f1", "auroc", "average_precision", *BY_LABEL)
    drawn: ClassVar[tuple[str, ...]] = ("micro_f1", "auroc", "average_precision")
    lists: ClassVar[tuple[str, ...]] = ("positives", "predicted_positives", "true_positives", "ranks", *BY_LABEL)
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "right", "loss": "loss_of_rows"})
    sums: ClassVar[tuple[str, ...]] = (
        "rows",
        "right",
        "loss_of_rows",
        "positives",
        "predicted_positives",
        "true_positives",
        "ranks",
    )
    problem_type: ClassVar[str | None] = "multi_label_classification"

    threshold: float | str = setting(
        0.5,
        'multi_label: probability from which on a row gets a label, or "validation": one for each label, with the '
        "largest F1 on the validation rows",
        gt=0,
        lt=1,
        choices=("validation",),
        words='a number in (0, 1), or "validation"',
    )

    # --- rows ---------------------------------------------------------------------------------------------------------
    def read_targets(self, sheet: Sheet, spec: DataSpec, *, source: str) -> RowTargets:
        from fedfm.tasks import _label_sets

        return _label_sets.read(sheet, spec, source)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _label_sets

        return _label_sets.forewarnings(parts)

    # --- model --------------------------------------------------------------------------------------------------------
    def auto_class(self, kind: str) -> str:
        return "ImageClassification" if kind == "image" else "SequenceClassification"

    def peft_type(self, kind: str) -> str | None:
        return None if kind == "image" else "SEQ_CLS"

    def loss(self, model: Network, batch: Batch) -> Tensor:
        return self.row_losses(model, batch)[0].mean()

    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        import torch

        losses = _losses(model.logits(batch).float(), batch["targets"])
        return losses, torch.ones_like(losses, dtype=torch.int64)

    # --- scores -------------------------------------------------------------------------------------------------------
    def thresholds(self, classes: Sequence[str]) -> list[float]:
        """The probability from which on a row gets each label."""
        chosen = self.threshold
        if isinstance(chosen, Mapping):
            return [chosen.get(name, 0.5) for name in classes]
        return [0.5 if isinstance(chosen, str) else chosen] * len(classes)

    @property
    def needs_validation(self) -> str:
        return 'model.threshold = "validation"' if self.threshold == "validation" else ""

    def choose(self, scores: Mapping[str, Any], classes: tuple[str, ...]) -> Mapping[str, Any]:
        from fedfm.tasks import _label_scores

        if not self.needs_validation or scores.get("ranks") is None:
            return {}
        best = _label_scores.best_thresholds(scores["ranks"], len(classes))
        return {"threshold": {name: 0.5 if p is None else p for name, p in zip(classes, best, strict=True)}}

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        import torch

        from fedfm.tasks import _label_scores

        targets = rows.tensors["targets"]
        found = logits.double() >= torch.tensor(self.thresholds(model.classes), dtype=torch.float64).logit()
        right = found & (targets > 0)
        return {
            "rows": len(rows),
            "right": int((found == (targets > 0)).all(1).sum()),
            "loss_of_rows": float(_losses(logits.double(), targets).sum()),
            "positives": (targets > 0).sum(0).tolist(),
            "predicted_positives": found.sum(0).tolist(),
            "true_positives": right.sum(0).tolist(),
            "ranks": _label_scores.rank_counts(logits.numpy(), targets.numpy()),
        }

    def add_sums(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from fedfm.tasks import _label_scores

        ranks = [part.get("ranks") for part in parts]
        known = None if None in ranks else _label_scores.add_ranks(ranks)
        return {**super().add_sums([{**part, "ranks": 0} for part in parts]), "ranks": known}

    def from_sums(self, sums: Mapping[str, Any]) -> Scores:
        from fedfm.tasks import _label_scores

        return {**self.means_over_rows(sums), **_label_scores.scores(sums)}

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        model = trained.model
        found = trained.logits(trained.encode(model.prepare(table, range(len(table))))).double().sigmoid().tolist()
        least = self.thresholds(model.classes)
        named = [dict(zip(model.classes, row, strict=True)) for row in found]
        at = dict(zip(model.classes, least, strict=True))
        return {
            "classes": list(model.classes),
            "thresholds": at,
            "labels": [[name for name, p in row.items() if p >= at[name]] for row in named],
            "probabilities": [{name: round(p, 6) for name, p in row.items()} for row in named],
        }

    def about_outputs(self) -> str:
        from fedfm.tasks import _label_sets

        return _label_sets.about_outputs(self.threshold)

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        from fedfm.tasks import _label_sets

        return _label_sets.tables(figures, classes, BY_LABEL)

    def describe(self, model: Network) -> dict[str, Any]:
        return {"task": self.name, "thresholds": dict(zip(model.classes, self.thresholds(model.classes), strict=True))}


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean binary cross-entropy over labels of each row (b,), from logits and targets (b, C)."""
    import torch.nn.functional as F

    right = targets.to(logits)
    return F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
