"""Gradient checkpointing: keep the input of each block, and compute the block again in the backward pass.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang, Guestrin. 2016. arXiv:1604.06174. Memory then holds the
activations of one block instead of all blocks, and the computation takes a third longer. transformers' own
checkpointing is active only in training mode, which would switch on the foundation model's dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.models.families import Parts


def check(parts: Parts, adaptation: str) -> None:
    """Raise an InputError if checkpointing would do nothing."""
    if adaptation in ("head", "side_adapter"):
        raise InputError(
            f'model.gradient_checkpointing: no gradient passes the blocks with adaptation "{adaptation}"; drop it'
        )
    if not any(parts.encoders):
        raise InputError("model.gradient_checkpointing: the blocks of this architecture are unknown; drop it")


def begin(parts: Parts) -> None:
    """Make the backward pass compute each block again, from now on."""
    for block in _blocks(parts):
        vars(block)["forward"] = partial(_twice, type(block).forward.__get__(block))


def end(parts: Parts) -> None:
    """Undo :func:`begin`. Otherwise a copy of the module would call the original's blocks."""
    for block in _blocks(parts):
        vars(block).pop("forward", None)


def _twice(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _blocks(parts: Parts) -> Iterable[nn.Module]:
    return (block for blocks in parts.encoders for _, block in blocks)
