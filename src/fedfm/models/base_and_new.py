"""Accuracy on classes that were trained and on classes that were not."""

from __future__ import annotations

from torch import Tensor

from fedfm.models.metrics import BASE_AND_NEW, Scores, answered_rows


def base_and_new(logits: Tensor, labels: Tensor, base: int) -> Scores:
    """Accuracy on rows of base classes, accuracy on rows of new classes, and their harmonic mean, from logits (n, C).

    The first ``base`` classes are the base classes, the others are new. A row is classified only among the classes of
    its own group, base or new. A score without rows is None.

    Conditional Prompt Learning for Vision-Language Models (CoCoOp). Zhou, Yang, Loy, Liu. CVPR 2022. arXiv:2203.05557.
    Section 4.1.
    """
    found: list[float | None] = []
    for rows, among in ((labels < base, slice(0, base)), (labels >= base, slice(base, None))):
        hits = (logits[rows, among].argmax(-1) == labels[rows] - among.start) & answered_rows(logits[rows])
        found.append(hits.double().mean().item() if len(hits) else None)
    b, n = found
    mean = None if b is None or n is None else 2 * b * n / (b + n) if b + n else 0.0
    return dict(zip(BASE_AND_NEW, (b, n, mean), strict=True))
