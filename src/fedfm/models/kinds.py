"""Which of our own classes a module has, without an import: of a class that nobody has loaded there is none.

So a model with one encoder loads no code of those with two.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from fedfm.models.architectures.dual_encoder import DualEncoder
    from fedfm.models.architectures.pooled_encoder import PooledEncoder


def is_dual_encoder(module: Any) -> TypeGuard[DualEncoder]:
    """Whether a module has two encoders, of pictures and of texts."""
    return is_of(module, "fedfm.models.architectures.dual_encoder:DualEncoder")


def is_pooled_encoder(module: Any) -> TypeGuard[PooledEncoder]:
    """Whether a module is an encoder of pictures with a linear head on what it pools."""
    return is_of(module, "fedfm.models.architectures.pooled_encoder:PooledEncoder")


def is_of(value: Any, place: str) -> bool:
    """As ``isinstance`` with the class at ``module:Class``."""
    module, _, name = place.partition(":")
    found = sys.modules.get(module)
    return found is not None and isinstance(value, vars(found)[name])
