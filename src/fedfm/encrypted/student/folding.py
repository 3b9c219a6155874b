"""The blocks of a polynomial student as matrices and polynomials: all affine maps are folded into the matrices.

The encrypted computation uses these matrices. Scales and shifts of the norms are folded into the linear maps that
follow. The factor of the scores is folded into the queries. Linear maps whose output is added to the tokens also
subtract the mean over features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.encrypted.student.folded_blocks import (
    Folded,
    FoldedBlock,
    Matrix,
    array_of,
    centre_rows,
    fold_neurons,
)
from fedfm.encrypted.student.modules import Functions, mean_over_places
from fedfm.encrypted.student.neuron_polynomials import NeuronCore, NeuronGelu
from fedfm.encrypted.student.polynomials import Inverse, Polynomial, Quadratic
from fedfm.encrypted.student.text_folding import fold_text_blocks, fold_texts
from fedfm.encrypted.token_places import places_of
from fedfm.errors import InputError
from fedfm.models import families
from fedfm.models.adapters.side_texts import text_places

KEY = "fedfm_polynomials"  # key of the polynomials in config.json
PRE_NORM = ("vit", "deit", "ijepa")  # model types whose blocks are norm, attention, sum, norm, MLP, sum
MOST_OUTSIDE = 1e-3  # largest fraction of arguments outside their intervals in evaluation
_GRID = 2001  # number of points of an interval at which a polynomial's intermediate values are computed


@dataclass(frozen=True)
class Patches:
    """The map from images to tokens, which contain pixels.

    Attributes:
        size: (height, width) of a patch.
        extra: number of class tokens, which come first.
    """

    size: tuple[int, int]
    extra: int = 0

    def __call__(self, pixel_values: Tensor) -> Tensor:
        """Map pixel values (n, 3, H, W) to the tokens' pixels (n, T, F)."""
        x = F.unfold(pixel_values, self.size, stride=self.size).transpose(1, 2)
        return F.pad(x, (0, 0, self.extra, 0))


def patches_of(module: nn.Module) -> Patches:
    """Return the map from images to tokens of a polynomial student, without folding its blocks."""
    inner: Any = families.unwrap(module)
    embedding: Any = families.find(inner, inner.config.model_type).embedding
    return Patches(tuple(embedding.patch_embeddings.projection.kernel_size), len(_front(embedding)))


def _front(embedding: Any) -> list[Tensor]:
    """Return the tokens that come before the patches, each (1, 1, d)."""
    return [getattr(embedding, name) for name in ("cls_token", "distillation_token") if hasattr(embedding, name)]


def remedy(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Say what keeps more arguments within their intervals; only a conversion has a polynomial for each neuron.

    Args:
        blocks: the entries of the student's blocks.
    """
    if blocks and blocks[0]["gelu"].get("kind") == "neurons":
        return "convert it again on more rows (data.limit, distil.drawn), or with a wider distil.margin"
    return "train it longer"


def fold(module: nn.Module) -> Folded:
    """Return the matrices and polynomials of a polynomial student, in float64.

    Raises:
        InputError: the module is not a polynomial student, or cannot run encrypted; the error states why.
    """
    inner: Any = families.unwrap(module)
    table = getattr(inner.config, KEY, None)
    kind = getattr(inner.config, "model_type", "")
    if table is None:
        raise InputError("the model has no polynomials; make its polynomial student with `fedfm distil`")
    texts = bool(text_places(inner))
    if kind not in PRE_NORM and not texts:
        raise InputError(f"a model of type {kind!r} cannot run encrypted; expected a ViT, a DeiT, an I-JEPA or a BERT")
    if inner is not module:
        raise InputError("the model has adapters; merge them into its weights first")
    if not table["outside"] <= MOST_OUTSIDE:
        raise InputError(
            f"{table['outside']:.2%} of the arguments of the model's functions were outside their intervals on "
            f"held-out rows, more than {MOST_OUTSIDE:.1%}; {remedy(table['blocks'])}"
        )
    if texts:
        return fold_texts(inner, table, max(map(largest_inside, fold_text_blocks(inner))))
    parts = families.find(inner, kind)
    embedding: Any = parts.embedding
    projection = embedding.patch_embeddings.projection
    positions = array_of(embedding.position_embeddings[0])
    weight = array_of(projection.weight).reshape(len(projection.weight), -1)
    bias = np.zeros(len(weight)) if projection.bias is None else array_of(projection.bias)
    front = _front(embedding)
    for i, token in enumerate(front):
        positions[i] += array_of(token[0, 0]) - bias  # a class token's pixels are zeros, so its embedding is the bias
    blocks = tuple(fold_block(block) for _, block in parts.blocks)
    largest = max(entry["largest"] for entry in table["blocks"])
    return Folded(
        embedding=centre_rows(weight),
        bias=centre_rows(bias),
        positions=positions - positions.mean(-1, keepdims=True),
        blocks=blocks,
        scales=np.array([entry["scale"] for entry in table["blocks"]]),
        ranges=np.array([entry["range"] for entry in table["blocks"]]),
        bound=max([largest, *map(largest_inside, blocks)]),
        patch=patches_of(inner),
        class_token=bool(front),
    )


def fold_block(block: Any) -> FoldedBlock:
    """Fold a block of a ViT, a DeiT or an I-JEPA with polynomials."""
    functions = Functions.of(block)
    softmax, norms, gelu = functions.softmax, functions.norms, functions.gelu
    attention = block.attention
    exponential, inverse, quadratic = softmax.exponential, softmax.inverse, gelu.quadratic
    first, second = (norm.inverse for norm in norms)
    if exponential is None or inverse is None or quadratic is None or first is None or second is None:
        raise InputError("a block still has exact functions")
    maps = {
        "query": (attention.q_proj, norms[0]),
        "key": (attention.k_proj, norms[0]),
        "value": (attention.v_proj, norms[0]),
        "up": (block.mlp.fc1, norms[1]),
        "output": (attention.o_proj, None),
        "down": (block.mlp.fc2, None),
    }
    weights: dict[str, Matrix] = {}
    for name, (linear, norm) in maps.items():
        w = array_of(linear.weight)
        b = np.zeros(len(w)) if linear.bias is None else array_of(linear.bias)
        if norm is None:
            w, b = centre_rows(w), centre_rows(b)
        else:
            # evaluate_folded() of 1 / x does not multiply by its scale, so the weights must contain the scale.
            scale = norm.inverse.fold[0] / norm.inverse.start if isinstance(norm.inverse, Inverse) else 1.0
            w, b = w * (array_of(norm.weight) * scale), b + w @ array_of(norm.bias)
        factor = attention.scaling if name == "query" else 1.0
        weights[name], weights[f"{name}_bias"] = w * factor, b * factor
    if bool(softmax.offset.any()):
        weights["key_offset"], weights["score_shift"] = array_of(softmax.offset).reshape(-1), array_of(softmax.shift)
    core: Quadratic | NeuronCore
    if isinstance(quadratic, NeuronGelu):
        fold_neurons(weights, quadratic)
        core = quadratic.core
    else:
        core = quadratic
    return FoldedBlock(
        weights=weights,
        heads=int(attention.num_attention_heads),
        norms=(first, second),
        exponential=exponential,
        inverse=inverse,
        inverse_scales=array_of(softmax.scales),
        gelu=core,
    )


def block_states(module: nn.Module, pixel_values: Tensor) -> Tensor:
    """Compute the block outputs b_1 .. b_L of images (n, 3, H, W) in the clear: (n, L, T, d), centred over features.

    Raises:
        InputError: the blocks of the model are unknown.
    """
    inner: Any = families.unwrap(module)
    blocks = families.find(inner, inner.config.model_type).blocks
    if not blocks:
        raise InputError(f"fedfm does not know the blocks of a model of type {inner.config.model_type!r}")
    caught: list[Tensor] = []

    def keep(_: nn.Module, __: Any, y: Any) -> None:
        y = y[0] if isinstance(y, tuple) else y
        caught.append(y - y.mean(-1, keepdim=True))

    hooks = [block.register_forward_hook(keep) for _, block in blocks]
    try:
        inner(pixel_values=pixel_values)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(caught, 1)


# --- magnitudes -------------------------------------------------------------------------------------------------------
@dataclass
class _Watched:
    """An array that records the largest magnitude of all values that are computed from it."""

    value: Matrix
    most: list[float]

    def __post_init__(self) -> None:
        self.most[0] = max(self.most[0], float(np.abs(self.value).max()))

    def __add__(self, other: Any) -> _Watched:
        return _Watched(self.value + getattr(other, "value", other), self.most)

    def __mul__(self, other: Any) -> _Watched:
        return _Watched(self.value * getattr(other, "value", other), self.most)

    def square(self) -> _Watched:
        return self * self


def _inside(polynomial: Polynomial) -> float:
    """Return the largest magnitude of an intermediate value of a polynomial on its interval."""
    most = [0.0]
    a, b = polynomial.fold
    points = a * np.linspace(*polynomial.interval, _GRID) + b
    polynomial.evaluate_folded(_Watched(points[:, None] if isinstance(polynomial, NeuronCore) else points, most))
    return most[0]


def largest_inside(block: FoldedBlock) -> float:
    """Return the largest magnitude inside a block's polynomials, row sums and inverses."""
    low, high = block.inverse.interval
    c = block.inverse_scales
    polynomials = (*block.norms, block.exponential, block.inverse, block.gelu)
    return max(*map(_inside, polynomials), high / float(c.min()), float(c.max()) / low)


def largest_between(block: FoldedBlock, x: Tensor) -> float:
    """Return the largest magnitude of a block's tokens and linear maps, for centred tokens x (n, T, d), in float64.

    These values have no intervals, so they are measured.
    """
    w = {name: torch.from_numpy(matrix) for name, matrix in block.weights.items()}
    n, tokens, d = x.shape
    most = 0.0

    def observe(y: Tensor) -> Tensor:
        nonlocal most
        most = max(most, float(y.abs().max()))
        return y

    def linear(name: str, y: Tensor) -> Tensor:
        return observe(y @ w[name].T + w[f"{name}_bias"])

    def norm(y: Tensor, polynomial: Polynomial) -> Tensor:
        a, b = polynomial.fold
        return observe(y * polynomial.evaluate_folded(a * observe(y.square().mean(-1, keepdim=True)) + b))

    def heads(y: Tensor) -> Tensor:
        return y.reshape(n, tokens, block.heads, -1).transpose(1, 2)

    y = norm(observe(x), block.norms[0])
    q, k, v = (heads(linear(name, y)) for name in ("query", "key", "value"))
    if block.centred_keys:
        k = observe(k - mean_over_places(k, places_of(tokens) - tokens))
    if "key_offset" in w:
        k = observe(k + w["key_offset"].reshape(block.heads, 1, -1))
    shift = w["score_shift"][:, None, None] if "score_shift" in w else 0.0
    powers = block.exponential(q @ k.transpose(-1, -2) + shift)
    c = torch.from_numpy(block.inverse_scales)[:, None, None]
    inverses = block.inverse.evaluate_folded(powers.sum(-1, keepdim=True) * c) * (c / block.inverse.start)
    weights = observe(powers * inverses)
    z = observe(x + linear("output", observe(weights @ v).transpose(1, 2).reshape(n, tokens, d)))
    y = norm(z, block.norms[1])
    hidden = observe(block.gelu(linear("up", y)))
    observe(z + linear("down", hidden) + (linear("skip", y) if "skip" in w else 0.0))
    return most if math.isfinite(most) else math.inf
