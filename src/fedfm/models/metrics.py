"""Scores of a model on rows, as JSON values; None if a score is not defined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Rows

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask
    from fedfm.models.network import Network

Scores = dict[str, Any]
BASE_AND_NEW = ("base_accuracy", "new_accuracy", "harmonic_mean")


def evaluate(model: Network, rows: Rows, batch_size: int = 64) -> Scores:
    """Scores of the model on the rows.

    Returns:
        ``n`` (rows), ``accuracy``, ``balanced_accuracy``, ``macro_f1``, ``loss``, ``perplexity``, ``tokens``, the
        task's own figures and the sums over rows from which they are computed. ``loss`` is the mean over rows. For
        language models it is the mean over predicted tokens, ``perplexity`` = exp(loss), and ``accuracy`` is the share
        of right next tokens. For instructions the accuracy is the exact match of the answers.

    Example:
        >>> from fedfm.models.wrap import wrap
        >>> model = wrap(torch.nn.Identity(), lambda module, batch: batch["features"].sum(), classes=("a", "b"))
        >>> rows = Rows({"features": torch.eye(2)}, labels=torch.tensor([0, 0]))
        >>> evaluate(model, rows)["accuracy"]
        0.5
    """
    if (own := getattr(model, "scores_function", None)) is not None:
        return own(model, rows, batch_size)  # type: ignore[no-any-return]
    return cast("ModelTask", model.task).scores(model, rows, batch_size)


def confusion(logits: Tensor, labels: Tensor) -> list[list[int]]:
    """Numbers of answered rows by true class and predicted class (C, C), from logits (n, C) and labels (n,).

    Example:
        >>> confusion(torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 1]))
        [[1, 1], [1, 0]]
    """
    classes, known = logits.shape[-1], answered_rows(logits)
    found = labels[known] * classes + logits[known].argmax(-1)
    return torch.bincount(found, minlength=classes**2).view(classes, classes).tolist()


def answered_rows(logits: Tensor) -> Tensor:
    """Mask (n,) of the rows of logits (n, C) that have an answer; one without has -inf for every class."""
    return (logits != -torch.inf).any(-1)


def scores(logits: Tensor, labels: Tensor) -> Scores:
    """Scores of logits (n, C) against labels (n,).

    ``balanced_accuracy`` is the mean recall over the classes in ``labels``, and ``macro_f1`` is the mean F1 over the
    classes in labels or predictions (scikit-learn's definitions). ``rows``, ``right`` and ``loss_of_rows`` are sums
    over rows. A row without an answer is wrong, a prediction of no class, and has the mean loss of the others.
    """
    n = len(labels)
    if not n:
        return nothing()
    known, classes = answered_rows(logits), max(logits.shape[-1], int(labels.max()) + 1)
    predicted = torch.where(known, logits.argmax(-1), classes)
    size = classes + 1
    table = torch.bincount(labels * size + predicted, minlength=size**2).view(size, size)[:-1].double()
    hit, actual, guessed = table.diagonal(), table.sum(1), table.sum(0)[:-1]
    recall = (hit / actual)[actual > 0]
    occurs = actual + guessed > 0
    total = float(F.cross_entropy(logits[known].double(), labels[known], reduction="sum"))
    loss = total / count if (count := int(known.sum())) else math.nan
    return nothing(n) | {
        "accuracy": float(hit.sum()) / n,
        "balanced_accuracy": float(recall.mean()),
        "macro_f1": float((2 * hit / (actual + guessed))[occurs].mean()),
        "loss": finite(loss),
        "rows": n,
        "right": int(hit.sum()),
        "loss_of_rows": finite(total if count == n else loss * n),
    }


def nothing(n: int = 0) -> Scores:
    """Scores of ``n`` rows in which each score is None."""
    keys = ("accuracy", "balanced_accuracy", "macro_f1", "loss", "perplexity", "tokens")
    return {"n": n} | dict.fromkeys(keys)


def finite(x: float) -> float | None:
    """The number as a JSON value; None for NaN and infinity."""
    return x if math.isfinite(x) else None
