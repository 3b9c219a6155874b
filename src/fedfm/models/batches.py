"""Batches for users' own modules: tensors by name, in any nesting that a collate function returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def move(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on the device; transformers' Trainer moves a batch in the same way."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: move(x, device) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [move(x, device) for x in value]
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for x in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(x)


def rows_of(batch: Mapping[str, Any]) -> int:
    """The number of rows of a batch: the length of its first tensor or list."""
    return next((len(x) for x in batch.values() if (isinstance(x, Tensor) and x.dim()) or isinstance(x, list)), 0)
