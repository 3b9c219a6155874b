"""Tests whether a model is of one of fedfm's own classes; imports no class, see :mod:`fedfm.models.kinds`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from fedfm.models.kinds import is_of

if TYPE_CHECKING:
    from fedfm.models.dual_encoder import DualModel

_OURS = ("fedfm.models.model:Model", "fedfm.models.dual_encoder:DualModel")


def is_dual_model(model: Any) -> TypeGuard[DualModel]:
    """Whether a model has two encoders; a zero-shot classifier that dropped its text encoder has only one."""
    return is_of(model, "fedfm.models.dual_encoder:DualModel")


def is_ours(model: Any) -> bool:
    """Whether a model's class is one of fedfm's own. A class derived from one may compute something else."""
    return f"{type(model).__module__}:{type(model).__qualname__}" in _OURS
