"""Checks that the tensors of a folder with quantised weights fit together: packed weights, scales and tables.

bitsandbytes does not check this. Scales may be 8-bit codes that have scales of their own; if the latter are missing,
bitsandbytes uses the codes as scales. If packed weights are too short, a part of the outputs stays uninitialised. Such
files load without an error, so this check runs first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fedfm.errors import InputError
from fedfm.models.checkpoint import shape_faults, some, tensors
from fedfm.models.stored_files import StoredWeights

_STATE = "quant_state.bitsandbytes__"  # followed by nf4 or fp4; has block sizes and the weight's shape as JSON
_TABLES, _NESTED = ("absmax", "quant_map"), ("nested_absmax", "nested_quant_map")
_SCALES, _FORMAT = "SCB", "weight_format"  # tensors next to a weight in 8 bits

Shape = tuple[int, ...]


def check(stored: StoredWeights, settings: Mapping[str, Any], weights: Mapping[str, Tensor], path: Path | str) -> None:
    """Compare a folder's packed weights with their scales, and with the shapes of the model's weights.

    Args:
        stored: the folder's tensors.
        settings: the folder's ``quantization_config``.
        weights: the model's weights by their names in the folder; only their shapes and dtypes are read.
        path: the folder, for messages.

    Raises:
        InputError: tensors are missing, or a tensor's length does not fit the other tensors.
    """
    heads, eight = stored.heads(), bool(settings.get("load_in_8bit"))
    lacking, odd = set[str](), dict[str, tuple[Shape, Shape]]()
    for name in sorted(_in_bits(heads, weights)):
        shape = tuple(weights[name].shape) if name in weights else None
        need = {name, _sibling(name, _SCALES)} if eight else {name, *_of_four_bits(stored, name, settings)}
        if need <= heads.keys():
            found = heads[name][0]
            sizes = _eight(name, found, shape) if eight else _four(name, _state(stored, _key(name, settings)), shape)
            odd |= {n: (heads[n][0], s) for n, s in sizes.items() if math.prod(heads[n][0]) != math.prod(s)}
        lacking |= need - heads.keys()
    faults = shape_faults(odd)
    if lacking:
        faults.insert(0, f"lacks {tensors(len(lacking))} of its quantised weights: {some(sorted(lacking))}")
    if faults:
        raise InputError(f"model.name: {path} {'; it '.join(faults)}", key="model.name")


def scales(stored: StoredWeights) -> set[str]:
    """Names of the scales and tables of quantised weights, whose values must be finite."""
    return {name for name in stored if is_companion(name) and _STATE not in name}


def is_companion(name: str) -> bool:
    """Whether a tensor is stored with a quantised weight, in addition to its packed values."""
    return _STATE in name or name.rpartition(".")[2] in (*_TABLES, *_NESTED, _SCALES, _FORMAT)


def _in_bits(heads: Mapping[str, tuple[Shape, str]], weights: Mapping[str, Tensor]) -> set[str]:
    """Names of the quantised weights: the file has integers for a floating-point weight, or has scales for it."""
    out = {n for n, weight in weights.items() if weight.is_floating_point() and heads[n][1] in ("U8", "I8")}
    for name in filter(is_companion, heads):
        above, _, last = name.rpartition(".")
        if _STATE in name:
            out.add(name.partition(f".{_STATE}")[0])
        else:
            out.add(f"{above}.weight" if last in (_SCALES, _FORMAT) else above)
    return out


def _sibling(name: str, last: str) -> str:
    return f"{name.rpartition('.')[0]}.{last}"


def _key(name: str, settings: Mapping[str, Any]) -> str:
    """Name of the tensor with the state of a weight in 4 bits."""
    return f"{name}.{_STATE}{settings.get('bnb_4bit_quant_type', 'fp4')}"


def _of_four_bits(stored: StoredWeights, name: str, settings: Mapping[str, Any]) -> set[str]:
    """Names of the tensors that belong to a weight in 4 bits."""
    key = _key(name, settings)
    nested = settings.get("bnb_4bit_use_double_quant") or (key in stored and "nested_blocksize" in _state(stored, key))
    return {key, *(f"{name}.{table}" for table in (*_TABLES, *(_NESTED if nested else ())))}


def _state(stored: StoredWeights, key: str) -> dict[str, Any]:
    try:
        return dict(json.loads(bytes(stored[key].tolist())))
    except ValueError:
        raise InputError(
            f"model.name: {key} of the quantised weights is damaged: use an undamaged copy", key="model.name"
        ) from None


def _four(name: str, state: Mapping[str, Any], shape: Shape | None) -> dict[str, Shape]:
    """The expected shapes of a 4-bit weight's tensors, from ``shape``; if it is None, from the shape in ``state``."""
    count = math.prod(state["shape"] if shape is None else shape)
    blocks = -(-count // state["blocksize"])
    out: dict[str, Shape] = {name: (-(-count // 2), 1), f"{name}.absmax": (blocks,), f"{name}.quant_map": (16,)}
    if "nested_blocksize" in state:
        out |= {f"{name}.nested_absmax": (-(-blocks // state["nested_blocksize"]),), f"{name}.nested_quant_map": (256,)}
    return out


def _eight(name: str, found: Shape, shape: Shape | None) -> dict[str, Shape]:
    """As :func:`_four`, for a weight in 8 bits (d_out, d_in)."""
    return {name: found if shape is None else shape, _sibling(name, _SCALES): found[:1]}
