"""Refuses NaN and infinity in loaded weights and names the tensor and the file.

Without this check, a run with such weights would later look as if its training had diverged.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from fedfm.errors import InputError
from fedfm.models.locate import locate

_STATISTICS = ("running_mean", "running_var")
_FEW = 8  # a weight with fewer values is not checked for equal values
_INDEX = "model.safetensors.index.json"


class Finite:
    """Refuses NaN and infinity in weights and batch-norm statistics, and NaN in other buffers.

    Args:
        name: the model's name.
        weights: names of its parameters; a buffer, e.g. a mask, may contain infinity.
    """

    def __init__(self, name: str, weights: Collection[str]) -> None:
        self._name, self._weights = name, weights
        self._alike: list[tuple[str, float]] = []  # (name, the single value)

    def notices(self) -> list[str]:
        """A notice about weights whose values are all equal; [] if there are none."""
        if not self._alike:
            return []
        name, value = self._alike[0]
        more = f" (and {len(self._alike) - 1} more)" if len(self._alike) > 1 else ""
        words = "zeros" if value == 0 else f"{value:.3g}, in each place"
        return [f"model.name: {name}{more} of {self._name} holds nothing but {words}: was the conversion complete?"]

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Check one tensor.

        Raises:
            InputError: the tensor has NaN or infinity; the error names the tensor, the first such place and the file.
        """
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return
        total = tensor.sum(dtype=torch.float64)
        if bool(torch.isfinite(total)):
            if tensor.dim() > 1 and name.endswith(".weight") and _alike(tensor):
                self._alike.append((name, tensor[(0,) * tensor.dim()].item()))
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


def _alike(tensor: Tensor) -> bool:
    """Whether all values are equal to one number other than 1; the weights of a new norm are 1."""
    if tensor.numel() < _FEW:
        return False
    first = tensor[(0,) * tensor.dim()]
    return bool(first == tensor[(-1,) * tensor.dim()]) and bool(first != 1) and bool((tensor == first).all())


def _file(name: str, tensor: str) -> str:
    """The file of a model's tensor if the folder's index names it; else the folder, or the model's name."""
    place = locate(name)
    if not isinstance(place, Path) or place.is_file():
        return str(place)
    try:
        shards = json.loads((place / _INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError):
        single = place / "model.safetensors"
        return str(single if single.is_file() else place)
    # A name in the index may lack the prefix of the base.
    found = (file for name, file in shards.items() if f".{tensor}".endswith(f".{name}"))
    return str(place / next(found, _INDEX))
