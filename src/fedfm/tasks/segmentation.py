"""Semantic segmentation: each pixel of an image gets a class.

:mod:`fedfm.tasks._masked_rows` reads images with masks, :mod:`fedfm.tasks._mask_files` decodes a mask, and
:mod:`fedfm.tasks._mask_scores` computes losses, scores and predicted masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks.task import LORA, Column, Reading, RowKind, Scores, Sums, Task, Trained

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from fedfm.core.output_files import RowPictures
    from fedfm.core.row_targets import FigureTable
    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.linalg.params import Params
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

_COUNTS = ("pixels_by_class", "predicted_pixels_by_class", "right_pixels_by_class")
BY_CLASS = ("iou_by_class", "dice_by_class")


@dataclass(frozen=True)
class Segmentation(Task):
    """Logits (b, C, h, w), enlarged to the mask's size (H, W); the loss is the cross-entropy, a mean over pixels."""

    name: ClassVar[str] = "segmentation"
    kinds: ClassVar[tuple[str, ...]] = ("masked",)
    own_kind: ClassVar[RowKind | None] = RowKind("masked", "images with masks", wording=False, inputs=1)
    implied_by: ClassVar[tuple[str, ...]] = ("masked",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("mask", 'column of the masks, images of class numbers, task "segmentation"'),
    )
    new_head: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    own_modules: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "head", "top_layers", *LORA)
    figures: ClassVar[tuple[str, ...]] = ("mean_iou", "dice", *BY_CLASS)
    drawn: ClassVar[tuple[str, ...]] = ("mean_iou", "dice")
    sums: ClassVar[tuple[str, ...]] = ("pixels", "loss_of_pixels", *_COUNTS)
    lists: ClassVar[tuple[str, ...]] = (*_COUNTS, *BY_CLASS)

    ignore_index: int = setting(255, "segmentation: number in masks of the pixels that do not count", ge=-1, le=65535)

    # --- rows ---------------------------------------------------------------------------------------------------------
    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return {spec.image, spec.column("mask")} <= columns.keys() and spec.label not in columns

    def folder(self, path: Path, spec: DataSpec, *, labelled: bool) -> Sheet | None:
        from fedfm.tasks import _masked_folder

        return _masked_folder.sheet(path, spec, labelled)

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _masked_rows

        return _masked_rows.read(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        from fedfm.tasks import _masked_rows

        return _masked_rows.shuffle(rows, rng)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.tasks import _masked_rows

        return _masked_rows.to_rows(part, tools, classes, self.ignore_index)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _masked_rows

        return _masked_rows.forewarnings(parts, self.ignore_index)

    def target_groups(self, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """The classes; a mask may have all of them; see :class:`fedfm.tasks._row_survey.TargetGroups`."""
        return tuple(classes), len(classes)

    def group_members(self, table: Table, classes: Sequence[str]) -> np.ndarray:
        """Whether each row's mask has a pixel of each class (n, C)."""
        from fedfm.tasks import _masked_rows

        return _masked_rows.presence(table, classes, self.ignore_index)

    # --- model --------------------------------------------------------------------------------------------------------
    def input_kind(self, kind: str, *, text: bool) -> str:
        return "image"

    def auto_class(self, kind: str) -> str:
        return "SemanticSegmentation"

    def pipeline(self, kind: str) -> str | None:
        return "image-segmentation"

    def fit_config(self, config: Any, name: str) -> None:
        from fedfm.tasks import _pixel_models

        _pixel_models.fit_config(config, name, self.ignore_index)

    def check_tools(self, tools: Tools, name: str) -> None:
        from fedfm.tasks import _pixel_models

        _pixel_models.check_processor(tools.processor, name)

    def check_outputs(self, name: str, found: Sequence[int], images: Sequence[int], classes: int) -> None:
        from fedfm.tasks import _pixel_models

        _pixel_models.check_outputs(name, found, images, classes)

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.tasks import _mask_scores

        return _mask_scores.flat(logits, batch["targets"])

    def count_targets(self, batch: Batch) -> int:
        from fedfm.tasks import _mask_scores

        return _mask_scores.count_pixels(batch["targets"])

    def loss(self, model: Network, batch: Batch) -> Tensor:
        from fedfm.tasks import _mask_scores

        return _mask_scores.loss(model.logits(batch), batch["targets"])

    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.tasks import _mask_scores

        return _mask_scores.row_losses(model.logits(batch), batch["targets"])

    # --- scores -------------------------------------------------------------------------------------------------------
    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        from fedfm.tasks import _mask_scores

        return _mask_scores.count(model, rows, batch_size)

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        from fedfm.tasks import _mask_scores

        return _mask_scores.count_of(rows, logits, len(model.classes))

    def from_sums(self, sums: Mapping[str, Any]) -> Scores:
        from fedfm.tasks import _mask_scores

        return _mask_scores.scores(sums)

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _mask_scores

        return _mask_scores.answer(trained, table)

    def pictures(self, trained: Trained, table: Table) -> RowPictures:
        from fedfm.tasks import _mask_pictures

        return _mask_pictures.pictures(trained, table, self.ignore_index)

    def for_export(self, model: Network, w: Params) -> tuple[Segmentation, Params]:
        from fedfm.tasks import _pixel_models

        _pixel_models.keep_numbers(model.tools.processor)
        return self, w

    def about_outputs(self) -> str:
        return (
            "The output has one score per class for each pixel of the prepared image, or of a smaller one: enlarge it "
            "to the image, bilinear, and take the class with the largest score, as "
            "`post_process_semantic_segmentation` does."
        )

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        from fedfm.tasks import _mask_scores

        return _mask_scores.tables(figures, classes)

    def describe(self, model: Network) -> dict[str, Any]:
        return {"task": self.name, "ignore_index": self.ignore_index}
