"""Several labels per row, or none: a new head gives each label a probability of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedfm.core.fields import setting
from fedfm.tasks._own_targets import OwnTargetsTask
from fedfm.tasks.task import Column, Scores, Sums, Trained

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedfm.core.row_targets import FigureTable, RowTargets
    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

_COUNTS = ("positives", "predicted_positives", "true_positives", "ranks")  # sums with an entry for each label or bin
BY_LABEL = ("rows_by_label", "f1_by_label", "auroc_by_label", "average_precision_by_label")


@dataclass(frozen=True)
class MultiLabel(OwnTargetsTask):
    """Logits (b, C); the loss is the binary cross-entropy, a mean over rows and labels."""

    name: ClassVar[str] = "multi_label"
    class_word: ClassVar[str] = "label"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("label_separator", 'text between the names of a row\'s labels in one cell, task "multi_label"', ";"),
    )
    absent_target: ClassVar[float | None] = 0.0
    figures: ClassVar[tuple[str, ...]] = ("micro_f1", "auroc", "average_precision", *BY_LABEL)
    drawn: ClassVar[tuple[str, ...]] = ("micro_f1", "auroc", "average_precision")
    lists: ClassVar[tuple[str, ...]] = (*_COUNTS, *BY_LABEL)
    least_rows: ClassVar[int] = 2  # the counts by label of one row are its labels
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({"accuracy": "right", "loss": "loss_of_rows"})
    sums: ClassVar[tuple[str, ...]] = ("rows", "right", "loss_of_rows", *_COUNTS)
    problem_type: ClassVar[str | None] = "multi_label_classification"

    threshold: float | str = setting(
        0.5,
        'multi_label: least probability at which a row gets a label; "validation": for each label, the probability '
        "with the largest F1 on the validation rows",
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

    def target_groups(self, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """The labels; a row may have all of them; see :class:`fedfm.tasks._row_survey.TargetGroups`."""
        return tuple(classes), len(classes)

    def group_members(self, table: Table, classes: Sequence[str]) -> np.ndarray:
        """Whether each row has each label (n, C)."""
        from fedfm.models.preprocessing import targets_of

        return targets_of(table, tuple(classes), self)["targets"].numpy().astype("float64")

    # --- model --------------------------------------------------------------------------------------------------------
    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.tasks import _label_scores

        return _label_scores.row_losses(model.logits(batch).float(), batch["targets"])

    def head_targets(self, rows: Rows, outputs: int) -> Tensor:
        """1 for a row's labels and -1 for the others, so that a score above 0 means a probability above one half."""
        return 2.0 * rows.tensors["targets"].float() - 1.0

    # --- scores -------------------------------------------------------------------------------------------------------
    def thresholds(self, classes: Sequence[str]) -> dict[str, float]:
        """For each label, the least probability at which a row gets it."""
        chosen: Mapping[str, float] = self.threshold if isinstance(self.threshold, Mapping) else {}
        every = 0.5 if chosen or isinstance(self.threshold, str) else self.threshold
        return {name: chosen.get(name, every) for name in classes}

    @property
    def needs_validation(self) -> str:
        return 'model.threshold = "validation"' if self.threshold == "validation" else ""

    def choose(self, scores: Mapping[str, Any], classes: tuple[str, ...]) -> Mapping[str, Any]:
        from fedfm.tasks import _label_scores

        return _label_scores.choose(scores.get("ranks"), classes) if self.needs_validation else {}

    def with_chosen(self, chosen: Mapping[str, Mapping[str, float]], classes: Sequence[str]) -> Self:
        if not chosen or not self.needs_validation:
            return super().with_chosen(chosen, classes)
        from fedfm.tasks import _label_scores

        keys: dict[str, Any] = {"threshold": _label_scores.check_thresholds(chosen, classes)}
        return replace(self, **keys)

    def list_sizes(self, classes: Sequence[str]) -> dict[str, int]:
        return {name: size for name, size in super().list_sizes(classes).items() if name != "ranks"}

    def check_scores(self, scores: Mapping[str, Any], classes: Sequence[str]) -> None:
        from fedfm.tasks import _label_scores

        _label_scores.check_counts(scores, len(classes))
        super().check_scores(scores, classes)

    def coarsen(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        from fedfm.tasks import _label_scores

        return _label_scores.coarse_scores(scores)

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        from fedfm.tasks import _label_scores

        return _label_scores.count(logits, rows.tensors["targets"], self.thresholds(model.classes))

    def add_sums(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        from fedfm.tasks import _label_scores

        plain = super().add_sums([{**part, "ranks": 0} for part in parts])
        return {**plain, "ranks": _label_scores.add_ranks([part.get("ranks") for part in parts])}

    def from_sums(self, sums: Mapping[str, Any]) -> Scores:
        from fedfm.tasks import _label_scores

        return {**self.means_over_rows(sums), **_label_scores.scores(sums)}

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _label_scores

        rows = trained.encode(trained.model.prepare(table, range(len(table))))
        return _label_scores.answer(trained.logits(rows), self.thresholds(trained.model.classes))

    def about_outputs(self) -> str:
        from fedfm.tasks import _label_sets

        return _label_sets.about_outputs(self.threshold)

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        from fedfm.tasks import _label_sets

        return _label_sets.tables(figures, classes, BY_LABEL)

    def describe(self, model: Network) -> dict[str, Any]:
        return {"task": self.name, "thresholds": self.thresholds(model.classes)}
