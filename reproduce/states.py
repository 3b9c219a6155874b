"""A frozen model's outputs for each picture, computed once in a process and used by all of its runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.linalg.params import to_bytes
from fedfm.models.adapters.side_adapter import SideModel
from fedfm.models.model import Model

_of_blocks, _of_heads = SideModel.states, Model.features
_kept: dict[tuple[Any, ...], Tensor] = {}


def keep() -> None:
    """Make side adapters and heads compute each picture once for the same model."""
    SideModel.states = states  # type: ignore[method-assign]
    Model.features = features  # type: ignore[method-assign]


def states(model: SideModel, rows: Rows) -> Tensor:
    """``SideModel.states``, but the states of each image are computed only once."""
    backbone, released, scales = model.frozen_parts
    of_model = (backbone.fingerprint, *(bytes(to_bytes(t)) for t in (released.positions, scales)), model.net.shape)
    found = _once(of_model, rows, lambda left: _of_blocks(model, left))
    return torch.zeros(0, *model.net.shape) if found is None else found


def features(model: Model, rows: Rows) -> Tensor:
    """``Model.features`` for a model that trains only its head, but each image's features are computed only once."""
    if model.adaptation != "head" or "pixel_values" not in rows.tensors:
        return _of_heads(model, rows)
    found = _once((model.fingerprint, "features"), rows, lambda left: _of_heads(model, left))
    return _of_heads(model, rows) if found is None else found


def _once(of_model: tuple[Any, ...], rows: Rows, compute: Callable[[Rows], Tensor]) -> Tensor | None:
    """What ``compute`` returns for the rows, which is computed once for each picture; None if there are no rows."""
    pictures = rows.tensors["pixel_values"]
    keys = [(*of_model, hashlib.sha256(to_bytes(p.contiguous())).digest()) for p in pictures]
    if missing := [i for i, key in enumerate(keys) if key not in _kept]:
        found = compute(rows.take(np.array(missing)))
        _kept.update((keys[i], state.clone()) for i, state in zip(missing, found, strict=True))
    return torch.stack([_kept[key] for key in keys]) if keys else None
