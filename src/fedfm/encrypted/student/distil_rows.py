"""Rows of a distillation: several views of each image, and the teacher's outputs, which are computed only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedfm import seeds
from fedfm.api.model_folder import fits, prepare_rows
from fedfm.core import storage
from fedfm.core.rows import Batch, Rows
from fedfm.data.table import Table
from fedfm.encrypted.student.distillation_loss import TAUGHT, Taps
from fedfm.encrypted.student.drawn_pictures import drawn_pictures
from fedfm.encrypted.student.scores import Outputs, outputs
from fedfm.errors import RunError
from fedfm.models import preprocessing
from fedfm.models.model import Model
from fedfm.models.preprocessors import Tools

MEASURED = 8192  # number of rows on which the intervals of the polynomials' arguments are measured
AT_ONCE = 64  # number of rows in a batch for evaluation
_LEAST = 0.4  # smallest fraction of an image's area in a crop


@dataclass(frozen=True)
class Box:
    """A part of an image: left, top and side, as fractions of width and height; ``mirrored`` flips the part."""

    left: float
    top: float
    side: float
    mirrored: bool

    def cut(self, picture: Any) -> Any:
        """Cut this part out of a PIL image."""
        w, h = picture.size
        ends = (self.left * w, self.top * h, (self.left + self.side) * w, (self.top + self.side) * h)
        x0, y0, x1, y1 = (round(v) for v in ends)
        part = picture.crop((x0, y0, max(x1, x0 + 1), max(y1, y0 + 1)))
        return part.transpose(0) if self.mirrored else part  # FLIP_LEFT_RIGHT


def boxes_of(seed: int, view: int, count: int) -> list[Box]:
    """Draw random boxes for one view of ``count`` images; they are the same on every machine."""
    rng = seeds.generator(seed, "distil", "view", view)
    side = np.sqrt(rng.uniform(_LEAST, 1.0, count))
    left, top = rng.uniform(size=count) * (1 - side), rng.uniform(size=count) * (1 - side)
    mirrored = rng.uniform(size=count) < 0.5
    found = zip(left.tolist(), top.tolist(), side.tolist(), mirrored.tolist(), strict=True)
    return [Box(*box) for box in found]


def cut_rows(model: Model, table: Table, index: np.ndarray, boxes: Sequence[Box]) -> Rows:
    """Cut the boxes out of these images, as rows for a model."""
    left, image = iter(boxes), model.tools.image
    cut = None if image is None else lambda pictures: image([next(left).cut(p) for p in pictures])
    return preprocessing.prepare(table, index, classes=model.classes, tools=Tools(image=cut))


@dataclass(frozen=True)
class LazyBoxes:
    """Rows that are parts of images. A part is cut out only when its batch is read."""

    model: Model
    table: Table
    index: np.ndarray
    boxes: Sequence[Box]

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, index: np.ndarray) -> Batch:
        """Return the batch of the rows with these indices."""
        chosen = [self.boxes[i] for i in index]
        return cut_rows(self.model, self.table, self.index[index], chosen).batch(range(len(index)))


@dataclass(frozen=True)
class Taught:
    """Rows for the student, with the teacher's outputs.

    Attributes:
        known: the teacher's logits (n, C), the inputs of its head (n, d), and the labels.
    """

    rows: Rows | LazyBoxes
    known: Outputs

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Return a batch of the rows with these indices, and the teacher's outputs for these rows."""
        taught = {name: x[torch.as_tensor(index)] for name, x in zip(TAUGHT, self.known[:2], strict=True)}
        return self.rows.batch(np.asarray(index)) | taught


class Lessons:
    """Training rows in several views.

    Args:
        folder: where the teacher's outputs are stored.
        index: indices of the training rows in the table.
        views: number of views; if it is 1, there are only the unchanged rows.
        drawn: number of drawn pictures that :meth:`calibration_batches` yields, too.
    """

    def __init__(
        self,
        folder: Path,
        table: Table,
        teacher: Taps,
        student: Model,
        index: np.ndarray,
        *,
        views: int,
        seed: int,
        low: bool,
        drawn: int = 0,
    ) -> None:
        self._drawn = drawn
        self._folder, self._table, self._teacher, self._student = folder, table, teacher, student
        self._index, self._views, self._seed, self._low = index, views, seed, low
        self._last: tuple[int, Taught] | None = None

    def __len__(self) -> int:
        return len(self._index)

    def of(self, epoch: int) -> Taught:
        """Return the view for an epoch, which is counted from 1."""
        return self.view((epoch - 1) % self._views)

    def view(self, number: int) -> Taught:
        """Return the view with this number; view 0 has the unchanged rows."""
        if self._last is None or self._last[0] != number:
            self._last = None  # frees the memory of the last view's rows
            boxes = boxes_of(self._seed, number, len(self)) if number else None
            self._last = number, Taught(self._rows(boxes), self._teacher_outputs(number, boxes))
        return self._last[1]

    def _rows(self, boxes: list[Box] | None) -> Rows | LazyBoxes:
        student, table, index = self._student, self._table, self._index
        if boxes is None:
            return prepare_rows(student, table, index)
        if fits(student, table, index):
            return cut_rows(student, table, index, boxes)
        return LazyBoxes(student, table, index, boxes)

    def calibration_batches(self) -> Iterator[Batch]:
        """Yield drawn pictures, and :data:`MEASURED` rows in all, or all rows in all views if these are fewer."""
        from PIL import Image

        image: Any = self._student.tools.image
        for start in range(0, self._drawn, AT_ONCE):
            side = min(image([Image.new("RGB", (64, 64))]).shape[2:])  # after resizing and cropping
            pictures = drawn_pictures(side, self._seed, min(start + AT_ONCE, self._drawn), start)
            yield {"pixel_values": image(pictures), "labels": torch.zeros(len(pictures), dtype=torch.long)}
        left = MEASURED
        for number in range(self._views):
            rows = self.view(number)
            n = min(len(rows), left)
            left -= n
            for start in range(0, n, AT_ONCE):
                yield rows.batch(np.arange(start, min(start + AT_ONCE, n)))

    def _teacher_outputs(self, number: int, boxes: list[Box] | None) -> Outputs:
        path = self._folder / f"teacher-{number:03d}.safetensors"
        found: Any = storage.load(path)
        if found is None:
            parts = [self._ask_teacher(start, boxes) for start in range(0, len(self), AT_ONCE)]
            logits, features, labels = (torch.cat(x) for x in zip(*parts, strict=True))
            if not features.isfinite().all():
                raise RunError("the teacher's outputs on some rows are NaN or infinite")
            found = {"logits": logits, "features": features, "labels": labels}
            storage.save(path, found)
        return found["logits"], found["features"], found["labels"]

    def _ask_teacher(self, start: int, boxes: list[Box] | None) -> Outputs:
        model, index = self._teacher.model, self._index[start : start + AT_ONCE]
        if boxes is None:
            rows = model.prepare(self._table, index)
        else:
            rows = cut_rows(model, self._table, index, boxes[start : start + AT_ONCE])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self._low):
            return outputs(self._teacher, rows, len(rows))
