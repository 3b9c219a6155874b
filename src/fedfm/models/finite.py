"""Refuse NaN and infinity in weights, with tensor and file: later they would look like diverged training."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.models.locate import locate

_STATISTICS = ("running_mean", "running_var")
_INDEX = "model.safetensors.index.json"


class Finite:
    """Refuses NaN and infinity in weights and batch-norm statistics, and NaN in other buffers.

    Args:
        name: of the model.
        weights: names of its parameters; a buffer, e.g. a mask, may contain infinity.
    """

    def __init__(self, name: str, weights: Collection[str]) -> None:
        self._name, self._weights = name, weights
        self._zero: list[str] = []

    def notices(self) -> list[str]:
        """A line about weights that are all zero."""
        if not self._zero:
            return []
        more = f" and {len(self._zero) - 1} more" if len(self._zero) > 1 else ""
        return [f"model.name: {self._zero[0]}{more} of {self._name} holds nothing but zeros: was it converted whole?"]

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Check one tensor.

        Raises:
            InputError: with the tensor's name, the first place and the file.
        """
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return
        total = tensor.sum(dtype=torch.float64)
        if bool(torch.isfinite(total)):
            if total == 0 and tensor.dim() > 1 and name.endswith(".weight") and not bool(tensor.any()):
                self._zero.append(name)
            return
        strict = name in self._weights or name.endswith(_STATISTICS)
        place = torch.nonzero(~torch.isfinite(tensor) if strict else torch.isnan(tensor))
        if not len(place):
            return
        first = tuple(place[0].tolist())
        where = f"{name}{list(first)}" if first else name
        raise InputError(
            f"{_file(self._name, name)}: {where} is {float(tensor[first])}"
            f"{f', and {len(place) - 1:,} more of its values are not finite' if len(place) > 1 else ''}: the weights "
            "are damaged; use an undamaged copy"
        )


def _file(name: str, tensor: str) -> str:
    """The file of a model's tensor if the folder's index names it, else the model."""
    place = locate(name)
    if not isinstance(place, Path) or place.is_file():
        return str(place)
    try:
        shards = json.loads((place / _INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        single = place / "model.safetensors"
        return str(single if single.is_file() else place)
    found = (file for name, file in shards.items() if f".{tensor}".endswith(f".{name}"))  # saved without its head
    return str(place / next(found, _INDEX))
