"""Tests whether a module is of one of fedfm's own classes, without an import of the class.

A class that no code has imported has no instances. So a model with one encoder loads no code for two encoders.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fedfm.models.architectures.dual_encoder import DualEncoder
    from fedfm.models.architectures.pooled_encoder import PooledEncoder


def is_dual_encoder(module: Any) -> TypeGuard[DualEncoder]:
    """Whether a module has two encoders, of images and of texts."""
    return is_of(module, "fedfm.models.architectures.dual_encoder:DualEncoder")


def is_pooled_encoder(module: Any) -> TypeGuard[PooledEncoder]:
    """Whether a module is an encoder of images with a linear head on its pooled output."""
    return is_of(module, "fedfm.models.architectures.pooled_encoder:PooledEncoder")


def is_of(value: Any, place: str) -> bool:
    """The same as ``isinstance`` with the class at ``module:Class``."""
    module, _, name = place.partition(":")
    found = sys.modules.get(module)
    return found is not None and isinstance(value, vars(found)[name])
