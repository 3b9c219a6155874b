"""Which of our own classes a model or a module has, without an import: of a class that nobody has loaded there is none.

So a model with one encoder loads no code of those with two.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fedfm.models.architectures.dual_encoder import DualEncoder
    from fedfm.models.architectures.pooled_encoder import PooledEncoder
    from fedfm.models.dual_encoder import DualModel

_OURS = ("fedfm.models.model:Model", "fedfm.models.dual_encoder:DualModel")


def is_dual_encoder(module: Any) -> TypeGuard[DualEncoder]:
    """Whether a module has two encoders, of pictures and of texts."""
    return _is(module, "fedfm.models.architectures.dual_encoder:DualEncoder")


def is_pooled_encoder(module: Any) -> TypeGuard[PooledEncoder]:
    """Whether a module is an encoder of pictures with a linear head on what it pools."""
    return _is(module, "fedfm.models.architectures.pooled_encoder:PooledEncoder")


def is_dual_model(model: Any) -> TypeGuard[DualModel]:
    """Whether a model's module has two encoders that both stay."""
    return _is(model, "fedfm.models.dual_encoder:DualModel")


def is_ours(model: Any) -> bool:
    """Whether a model's class is one of our own itself: a class derived from it may compute otherwise."""
    return f"{type(model).__module__}:{type(model).__qualname__}" in _OURS


def _is(value: Any, place: str) -> bool:
    """As ``isinstance`` with the class at ``module:Class``."""
    module, _, name = place.partition(":")
    found = sys.modules.get(module)
    return found is not None and isinstance(value, vars(found)[name])
