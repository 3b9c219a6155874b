"""Sparse confusion counts, for tasks with too many classes for a confusion matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from fedfm.models.metrics import answered_rows

LISTED = 20  # number of mistakes that are listed


class ClassCounts(NamedTuple):
    """The confusion matrix without its empty cells.

    Attributes:
        classes: the number of classes C.
        cells: the number of rows by (true class, predicted class).
    """

    classes: int
    cells: Counter[tuple[int, int]]


def count(logits: Tensor, labels: Tensor) -> ClassCounts:
    """The counts of logits (n, C) and labels (n,), without rows that have no answer.

    Example:
        >>> import torch
        >>> count(torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 1])).cells[0, 1]
        1
    """
    known = answered_rows(logits)
    pairs = zip(labels[known].tolist(), logits[known].argmax(-1).tolist(), strict=True)
    return ClassCounts(logits.shape[-1], Counter(pairs))


def summary(counted: Sequence[ClassCounts]) -> dict[str, list[object]]:
    """Summed counts of one or more models, as plain lists whose lengths depend only on C.

    Returns:
        ``rows``: (C,) the number of rows of each class;
        ``predicted``: (C,) the number of rows that are predicted as each class;
        ``right``: (C,) the number of rows of each class that are predicted as this class;
        ``taken_for``: (C,) the most frequent wrong class for the rows of each class, with its count, or None;
        ``confused``: the :data:`LISTED` most frequent mistakes, each as true class, predicted class, number of rows.
    """
    classes = counted[0].classes
    cells = sum((c.cells for c in counted), Counter[tuple[int, int]]())
    rows, said, right = ([0] * classes for _ in range(3))
    taken: list[list[int] | None] = [None] * classes
    wrong = sorted(((a, b, n) for (a, b), n in cells.items() if a != b), key=lambda cell: (-cell[2], *cell[:2]))
    for (a, b), n in cells.items():
        rows[a] += n
        said[b] += n
        right[a] += n * (a == b)
    for a, b, n in wrong:
        taken[a] = taken[a] or [b, n]
    confused = [list(cell) for cell in wrong[:LISTED]]
    return {"rows": [*rows], "predicted": [*said], "right": [*right], "taken_for": [*taken], "confused": [*confused]}
