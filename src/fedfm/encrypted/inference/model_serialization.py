"""Serialise a folded model for worker processes, without pickle: numpy arrays, and polynomials as JSON."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedfm.encrypted.ckks.transformer_block import Folding, Powers
from fedfm.encrypted.inference.folded_model import FoldedLayer, FoldedModel
from fedfm.encrypted.inference.released_states import Numbers
from fedfm.encrypted.student.neuron_polynomials import NeuronCore
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Quadratic
from fedfm.errors import InputError

_KINDS: dict[str, Any] = {c.__name__: c for c in (Exponential, Inverse, InverseSquareRoot, NeuronCore, Quadratic)}
_ARRAYS = ("embedding", "bias", "positions", "scales", "ranges")


@dataclass(frozen=True)
class DecodedLayer:
    """A :class:`~fedfm.encrypted.inference.folded_model.FoldedLayer` that was loaded from bytes."""

    weights: Mapping[str, Numbers]
    heads: int
    norms: tuple[Folding, Folding]
    exponential: Powers
    inverse: Folding
    inverse_scales: Numbers
    gelu: Folding
    centred_keys: bool


@dataclass(frozen=True)
class DecodedModel:
    """A :class:`~fedfm.encrypted.inference.folded_model.FoldedModel` that was loaded from bytes."""

    embedding: Numbers
    bias: Numbers
    positions: Numbers
    blocks: Sequence[FoldedLayer]
    scales: Numbers
    ranges: Numbers
    bound: float
    class_token: bool


def model_bytes(folded: FoldedModel) -> bytes:
    """Serialise a complete folded model.

    Raises:
        InputError: the class of a polynomial is not in :mod:`fedfm.encrypted.student.polynomials`.
    """
    arrays = {name: np.asarray(getattr(folded, name)) for name in _ARRAYS}
    blocks = []
    for number, layer in enumerate(folded.blocks):
        arrays |= {f"{number}.weights.{name}": np.asarray(w) for name, w in layer.weights.items()}
        arrays[f"{number}.inverse_scales"] = np.asarray(layer.inverse_scales)
        recipes = [*layer.norms, layer.exponential, layer.inverse, layer.gelu]
        blocks.append(
            {"heads": layer.heads, "centred": layer.centred_keys, "recipes": [_fields_of(r) for r in recipes]}
        )
    about = {"blocks": blocks, "bound": folded.bound, "class_token": folded.class_token}
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def model_of(data: bytes) -> DecodedModel:
    """Load a folded model from the bytes of :func:`model_bytes`."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    about = json.loads(arrays.pop("about").tobytes())
    blocks = []
    for number, fields in enumerate(about["blocks"]):
        start = f"{number}.weights."
        weights = {name[len(start) :]: w for name, w in arrays.items() if name.startswith(start)}
        first, second, *others = (_recipe(r) for r in fields["recipes"])
        exponential, inverse, gelu = others
        scales = arrays[f"{number}.inverse_scales"]
        blocks.append(
            DecodedLayer(
                weights, fields["heads"], (first, second), exponential, inverse, scales, gelu, bool(fields["centred"])
            )
        )
    model_arrays = {name: arrays[name] for name in _ARRAYS}
    return DecodedModel(**model_arrays, blocks=blocks, bound=about["bound"], class_token=about["class_token"])


def _fields_of(recipe: Folding) -> dict[str, Any]:
    kind = type(recipe).__name__
    if _KINDS.get(kind) is not type(recipe):
        raise InputError(f"a polynomial of class {kind}: worker processes accept {', '.join(_KINDS)}")
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    return {"kind": kind} | {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


def _recipe(fields: dict[str, Any]) -> Any:
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k != "kind"}
    return _KINDS[fields["kind"]](**arguments)
