"""Compare a polynomial student with its teacher on held-out rows, and count arguments outside their intervals."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows
from fedfm.encrypted.student import conversion
from fedfm.encrypted.student.distillation_loss import Distiller, Taps, nearness
from fedfm.encrypted.student.modules import Functions
from fedfm.training.fit_head import HeadSpec, fit

_AT_ONCE = 64
Outputs = tuple[Tensor, Tensor, Tensor]
PROBED = 8192  # largest number of training rows to which a head is fitted
_L2 = 1e-2


class RowSource(Protocol):
    """A source of rows that returns batches."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def batch(self, index: np.ndarray) -> Batch:
        """Return the rows with these indices."""


@torch.no_grad()
def outputs(taps: Taps, rows: RowSource, most: int) -> Outputs:
    """Compute logits (n, C), head inputs (n, d) and labels (n,) of the first ``most`` rows, without gradients."""
    logits, features, labels = [], [], []
    n = min(len(rows), most)
    with taps.model.evaluating():
        for start in range(0, n, _AT_ONCE):
            batch = rows.batch(np.arange(start, min(start + _AT_ONCE, n)))
            logits.append(taps(batch).cpu())
            features.append(taps.features.cpu())
            labels.append(batch["labels"])
    return torch.cat(logits), torch.cat(features), torch.cat(labels)


def quick(distiller: Distiller, theirs: Outputs, judged: Rows) -> dict[str, Any]:
    """Return ``accuracy`` (None if the head is new), ``distance`` and ``outside``, as in :func:`compare`.

    Args:
        theirs: the teacher's outputs on the same rows.
    """
    conversion.forget(distiller.student.model.module)
    logits, features, y = outputs(distiller.student, judged, len(judged))
    return {
        "accuracy": None if distiller.new_head else _mean(logits.argmax(1) == y),
        "distance": float(nearness(features, theirs[1], each=True)),
        "outside": outside(distiller.student.functions),
    }


def compare(distiller: Distiller, rows: RowSource, judged: Rows, theirs: Outputs, known: Outputs) -> dict[str, Any]:
    """Compare teacher and student on held-out rows.

    If the head is new, a softmax regression is fitted to each model's features of training rows. Then ``agreement``
    compares the teacher's regression on the teacher's features with the same regression on the student's features.
    ``distance`` is the mean squared difference of the head's inputs, divided by the teacher's variance in each
    dimension. ``outside`` is the fraction of arguments outside their intervals.

    Args:
        theirs, known: the teacher's outputs on the held-out rows, and on the first :data:`PROBED` training rows.

    Returns:
        ``teacher_accuracy``, ``accuracy``, ``agreement``, ``distance``, ``outside``, and ``blocks``.
    """
    student = distiller.student
    found = quick(distiller, theirs, judged)
    mine = outputs(student, judged, len(judged))
    if distiller.new_head:
        classes = len(student.model.classes)
        (w, b), (v, c) = (_head(x, classes) for x in (known, outputs(student, rows, PROBED)))
        said, own, same = theirs[1] @ w.T + b, mine[1] @ v.T + c, mine[1] @ w.T + b
    else:
        said, own, same = theirs[0], mine[0], mine[0]
    return {
        **found,
        "teacher_accuracy": _mean(said.argmax(1) == theirs[2]),
        "accuracy": _mean(own.argmax(1) == theirs[2]),
        "agreement": _mean(said.argmax(1) == same.argmax(1)),
        "blocks": [
            {"depth": conversion.depth(block), "outside": outside([block]), **entry}
            for block, entry in zip(student.functions, distiller.entries, strict=True)
        ],
    }


def outside(blocks: Iterable[Functions]) -> float:
    """Return the fraction of these blocks' arguments that were outside their intervals in evaluation."""
    modules = [m for block in blocks for m in block]
    return sum(m.outside for m in modules) / max(sum(m.total for m in modules), 1)


def _mean(x: Tensor) -> float:
    return float(x.double().mean())


def _head(found: Outputs, classes: int) -> tuple[Tensor, Tensor]:
    _, x, y = found
    return fit(lambda: iter([(x.double(), y)]), classes, x.shape[1], HeadSpec(l2=_L2))
