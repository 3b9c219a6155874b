"""Batches for users' own modules: tensors by name, in any nesting that a collate function returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Batch, Rows


def move(value: Any, device: torch.device) -> Any:
    """The value with all its tensors on the device; transformers' Trainer moves a batch in the same way."""
    return convert(value, lambda x: x.to(device))


def convert(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value with each of its tensors changed. Mappings, lists, tuples and dataclasses keep their types."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return _like(value, {key: convert(x, change) for key, x in value.items()})
    if isinstance(value, list | tuple):
        parts = [convert(x, change) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else _like(value, parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: convert(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value


def _like(value: Any, parts: Any) -> Any:
    """The parts as an object of the value's type; unchanged if this type cannot be made from them."""
    try:
        return type(value)(parts)
    except TypeError:
        return parts


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for x in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(x)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors(getattr(value, f.name))


def only_tensors(value: Any) -> bool:
    """Whether the value is a tensor, or a list, tuple or mapping of such values."""
    if isinstance(value, Mapping | list | tuple):
        return len(value) > 0 and all(map(only_tensors, value.values() if isinstance(value, Mapping) else value))
    return isinstance(value, Tensor)


def as_mapping(value: Any) -> Mapping[str, Any] | None:
    """A module's outputs by name, if it returns a mapping, a named tuple, or an object with attributes; else None."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple):
        return dict(zip(value._fields, value, strict=True)) if hasattr(value, "_fields") else None
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, Tensor | list) else None


def rows_of(batch: Mapping[str, Any]) -> int:
    """Number of rows of a batch: the length of its first tensor, list or tuple, or else of the first tensor inside."""
    sized = (x for x in batch.values() if (isinstance(x, Tensor) and x.dim()) or isinstance(x, list | tuple))
    return next((len(x) for x in sized), next((len(x) for x in tensors(batch) if x.dim()), 0))


def batch_of(device: torch.device, rows: Rows, index: Sequence[int] | np.ndarray) -> Batch:
    """These rows as a batch on a device."""
    return {name: move(value, device) for name, value in rows.batch(index).items()}
