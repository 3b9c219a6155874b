"""Losses and scores of predicted masks, and the predictions themselves.

As in transformers' SegformerForSemanticSegmentation, the logits (b, C, h, w) are enlarged to the masks' size (H, W).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.output_files import OutputFile
from fedfm.core.row_targets import FigureTable
from fedfm.core.rows import Rows
from fedfm.data.table import Table
from fedfm.models.preprocessing import IGNORE
from fedfm.tasks import _mask_files
from fedfm.tasks._sums import entries, mean_of_known

if TYPE_CHECKING:
    from fedfm.models.network import Network
    from fedfm.models.trained import Trained

_AT_ONCE = 16  # number of rows whose images and logits are in memory together
_COUNTS = ("pixels_by_class", "predicted_pixels_by_class", "right_pixels_by_class")


def enlarge(logits: Tensor, size: Sequence[int]) -> Tensor:
    """Resize logits (b, C, h, w) to (b, C, H, W) by bilinear interpolation, float32."""
    return F.interpolate(logits.float(), size=tuple(size), mode="bilinear", align_corners=False)


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (b H W, C) and targets (b H W,) of the pixels, row by row."""
    said = enlarge(logits, targets.shape[-2:]).permute(0, 2, 3, 1)
    return said.flatten(0, 2), targets.to(logits.device, torch.int64).flatten()


def count_pixels(targets: Tensor) -> int:
    """The number of pixels that are not ignored."""
    return int((targets != IGNORE).sum())


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy over the pixels that are not ignored; 0 if all are ignored."""
    said, right = enlarge(logits, targets.shape[-2:]), targets.to(logits.device, torch.int64)
    if not count_pixels(targets):
        return said.sum() * 0.0
    return F.cross_entropy(said, right, ignore_index=IGNORE)


def row_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the sum of cross-entropies over the pixels that are not ignored (b,), and their number (b,)."""
    said, right = enlarge(logits, targets.shape[-2:]), targets.to(logits.device, torch.int64)
    each = F.cross_entropy(said, right, ignore_index=IGNORE, reduction="none")
    return each.sum((1, 2)), (right != IGNORE).sum((1, 2))


def count(model: Network, rows: Rows, batch_size: int) -> dict[str, Any]:
    """The ``sums`` of :class:`fedfm.tasks.segmentation.Segmentation`, from the model's predictions."""
    total = _nothing(len(model.classes))
    for part in _parts(rows):
        _add(total, count_of(part, model.predict(part, batch_size), len(model.classes)))
    return total


def count_of(rows: Rows, logits: Tensor, classes: int) -> dict[str, Any]:
    """As :func:`count`, but from the logits (n, C, h, w) of these rows."""
    total = _nothing(classes)
    targets = rows.deferred["targets"].compute() if "targets" in rows.deferred else rows.tensors["targets"]
    for said, of in zip(logits, targets.long(), strict=True):
        scores = enlarge(said[None], of.shape)[0]  # (C, H, W)
        counts = of != IGNORE
        right, found = of[counts], scores.argmax(0)[counts]
        total["pixels"] += len(right)
        losses = F.cross_entropy(scores[None], of[None], ignore_index=IGNORE, reduction="none")
        total["loss_of_pixels"] += float(losses.double().sum())
        for name, some in zip(_COUNTS, (right, found, right[right == found]), strict=True):
            more = torch.bincount(some, minlength=classes).tolist()
            total[name] = [a + b for a, b in zip(total[name], more, strict=True)]
    return total


def _nothing(classes: int) -> dict[str, Any]:
    return {"pixels": 0, "loss_of_pixels": 0.0, **{name: [0] * classes for name in _COUNTS}}


def _add(total: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        total[name] = (
            [a + b for a, b in zip(total[name], value, strict=True)] if name in _COUNTS else total[name] + value
        )


def scores(sums: Mapping[str, Any]) -> dict[str, Any]:
    """All scores that follow from the sums; {} if there are no pixels. An unknown sum is NaN, or a list with NaN.

    The IoU of a class is |right| / |in a mask or predicted|. Its Dice is 2 |right| / (|in a mask| + |predicted|). Both
    count the pixels of all rows. A class neither in a mask nor predicted has no score, and is left out of the means.

    Example:
        >>> found = scores({"pixels": 4, "loss_of_pixels": 2.0, "pixels_by_class": [3, 1],
        ...                 "predicted_pixels_by_class": [2, 2], "right_pixels_by_class": [2, 1]})
        >>> found["iou_by_class"], found["dice_by_class"], found["accuracy"], found["loss"]
        ([0.6666666666666666, 0.5], [0.8, 0.6666666666666666], 0.75, 0.5)
    """
    if sums["pixels"] == 0:
        return {}
    there, found, right = (entries(sums[name]) for name in _COUNTS)
    known = all(map(math.isfinite, (*there, *found, *right)))
    both = [a + b for a, b in zip(there, found, strict=False)] if known else []
    iou = [r / (n - r) if n else None for r, n in zip(right, both, strict=False)]
    dice = [2 * r / n if n else None for r, n in zip(right, both, strict=False)]
    return {
        "accuracy": sum(right) / sums["pixels"] if known else None,
        "loss": sums["loss_of_pixels"] / sums["pixels"],
        "mean_iou": mean_of_known(iou),
        "dice": mean_of_known(dice),
        "iou_by_class": iou or None,
        "dice_by_class": dice or None,
    }


def _parts(rows: Rows) -> Iterator[Rows]:
    """The rows, with their images, in parts that fit into memory."""
    return (rows.take(range(i, min(i + _AT_ONCE, len(rows)))).compute() for i in range(0, len(rows), _AT_ONCE))


# --- results ----------------------------------------------------------------------------------------------------------


def answer(trained: Trained, table: Table) -> dict[str, Any]:
    """The predicted mask of each row, at the size of its image."""
    masks, files = list[OutputFile](), list[str]()
    for start in range(0, len(table), _AT_ONCE):
        part = table.take(range(start, min(start + _AT_ONCE, len(table))))
        rows = trained.encode(trained.model.prepare(part, range(len(part))))
        for (image, *_), logits in zip(part.inputs, trained.logits(rows), strict=True):
            width, height = _mask_files.size_of(image)
            numbers = enlarge(logits[None], (height, width))[0].argmax(0)
            named = image.source if isinstance(image.source, str) else ""
            name = Path(named).stem or f"{len(masks):05d}"
            masks.append(OutputFile(f"{name}.png", _mask_files.png(numbers.numpy())))
            files.append(os.path.relpath(named, table.source) if named and Path(table.source).is_dir() else named)
    of_files = {"files": files} if any(files) else {}
    return {"classes": list(trained.model.classes), "masks": masks, **of_files}


def tables(figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
    """A report's table with the IoU and the Dice of each class."""
    iou, dice = (figures.get(name) for name in ("iou_by_class", "dice_by_class"))
    if not isinstance(iou, Mapping) or not isinstance(dice, Mapping):
        return []
    cells = ((name, *("-" if of.get(name) is None else f"{of[name]:.4f}" for of in (iou, dice))) for name in classes)
    note = "Over the pixels of all global test rows. A dash: the class is neither in a mask nor predicted."
    return [FigureTable("Scores of each class", ("class", "IoU", "Dice"), tuple(cells), note)]
