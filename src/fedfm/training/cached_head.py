"""Find the models that are a linear head on cached features; :mod:`fedfm.training.heads` trains these."""

from __future__ import annotations

import torch

from fedfm.models.model import Model


def applies(model: Model | None) -> bool:
    """Whether the model is a linear head with softmax cross-entropy on cached features."""
    return (
        model is not None
        and getattr(model, "adaptation", None) == "head"
        and getattr(model, "softmax", True)
        and model.task.classifies_by_head
        and isinstance(model.head, torch.nn.Linear)
        and model.head.weight.dtype == torch.float32
        and len(model.names) == 2
    )
