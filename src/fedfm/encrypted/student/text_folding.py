"""The blocks of a BERT with polynomials as matrices: post-norm, with the norms' scales and shifts folded away.

With u the normalised state before the norm's scale g and shift b, a block computes

    z = norm(C diag(g) u + C b + C W_o attention(u)),   u' = norm(C diag(g') z + C b' + C W_2 gelu(W_1 z)),

where C subtracts the mean over the features, and g, b are folded into the maps of the attention, g' and b' of the norm
between into W_1. So no norm of an encrypted block has a scale, and no state a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.encrypted.student.folded_blocks import Folded, FoldedBlock, Matrix, array_of, centre_rows, fold_neurons
from fedfm.encrypted.student.modules import Functions
from fedfm.encrypted.student.neuron_polynomials import NeuronCore, NeuronGelu
from fedfm.encrypted.student.polynomials import InverseSquareRoot, Polynomial, Quadratic
from fedfm.errors import InputError
from fedfm.models.adapters.side_texts import base_of, text_places


def fold_texts(inner: Any, table: Mapping[str, Any], bound: float) -> Folded:
    """Return the matrices and polynomials of a student of texts; its rows come embedded, with their mask.

    Args:
        table: the student's polynomials and magnitudes, from its ``config.json``.
        bound: largest magnitude inside the polynomials.
    """
    blocks, places = fold_text_blocks(inner), text_places(inner)
    features = len(blocks[0].weights["query"])
    return Folded(
        embedding=np.eye(features + 1),
        bias=np.zeros(features),
        positions=np.zeros((places, features)),
        blocks=blocks,
        scales=np.array([entry["scale"] for entry in table["blocks"]]),
        ranges=np.array([entry["range"] for entry in table["blocks"]]),
        bound=max([bound, *(entry["largest"] for entry in table["blocks"])]),
        patch=lambda x: x,
    )


def fold_text_blocks(module: Any) -> tuple[FoldedBlock, ...]:
    """Fold all blocks of a BERT with polynomials.

    Raises:
        InputError: a block has exact functions, or the norms of the paper, which divide by the variance.
    """
    base = base_of(module)
    before, found = base.embeddings.LayerNorm, []
    for block in base.encoder.layer:
        found.append(_fold_block(block, before))
        before = block.output.LayerNorm
    return tuple(found)


def _fold_block(block: Any, before: Any) -> FoldedBlock:
    functions = Functions.of(block)
    softmax, (first, second), gelu = functions.softmax, functions.norms, functions.gelu.quadratic
    if softmax.exponential is None or softmax.inverse is None or gelu is None:
        raise InputError("a block still has exact functions")
    if not isinstance(first.inverse, InverseSquareRoot) or not isinstance(second.inverse, InverseSquareRoot):
        raise InputError(
            'norms without 1 / sqrt(x) cannot run encrypted on texts; expected distil.polynomials = "scaled"'
        )
    attention = block.attention.self
    maps = {
        "query": (attention.query, before),
        "key": (attention.key, before),
        "value": (attention.value, before),
        "up": (block.intermediate.dense, first),
    }
    weights: dict[str, Matrix] = {}
    for name, (linear, norm) in maps.items():
        w, factor = array_of(linear.weight), attention.scaling if name == "query" else 1.0
        weights[name] = w * array_of(norm.weight) * factor
        weights[f"{name}_bias"] = (array_of(linear.bias) + w @ array_of(norm.bias)) * factor
    for name, linear in (("output", block.attention.output.dense), ("down", block.output.dense)):
        weights[name], weights[f"{name}_bias"] = (
            centre_rows(array_of(linear.weight)),
            centre_rows(array_of(linear.bias)),
        )
    weights["residual"] = centre_rows(np.diag(array_of(before.weight)))
    weights["residual_bias"] = centre_rows(array_of(before.bias))
    if bool(softmax.offset.any()):
        weights["key_offset"], weights["score_shift"] = array_of(softmax.offset).reshape(-1), array_of(softmax.shift)
    core: Quadratic | NeuronCore
    if isinstance(gelu, NeuronGelu):
        fold_neurons(weights, gelu)
        core = gelu.core
    else:
        weights["skip"], weights["skip_bias"] = np.zeros_like(weights["output"]), np.zeros(len(weights["output"]))
        core = gelu
    weights["skip"] = weights["skip"] + centre_rows(np.diag(array_of(first.weight)))
    weights["skip_bias"] = weights["skip_bias"] + centre_rows(array_of(first.bias))
    return FoldedBlock(
        weights=weights,
        heads=int(attention.num_attention_heads),
        norms=(first.inverse, second.inverse),
        exponential=softmax.exponential,
        inverse=softmax.inverse,
        inverse_scales=array_of(softmax.scales),
        gelu=core,
    )


def text_block_states(block: FoldedBlock, x: Tensor, real: Tensor) -> tuple[Tensor, float]:
    """Compute a folded block on normalised states x (n, T, d) in float64, with the mask (n, T) of real places.

    Returns:
        The next states (n, T, d), and the largest magnitude on the way.
    """
    w = {name: torch.from_numpy(matrix) for name, matrix in block.weights.items()}
    n, places, d = x.shape
    most = 0.0

    def observe(y: Tensor) -> Tensor:
        nonlocal most
        most = max(most, float(y.abs().max()))
        return y

    def linear(name: str, y: Tensor) -> Tensor:
        return observe(y @ w[name].T + w[f"{name}_bias"])

    def norm(y: Tensor, polynomial: Polynomial) -> Tensor:
        return observe(y * polynomial.evaluate(observe(y.square().mean(-1, keepdim=True))))

    def heads(y: Tensor) -> Tensor:
        return y.reshape(n, places, block.heads, -1).transpose(1, 2)

    mask = real.double()
    q, k, v = heads(linear("query", observe(x))), heads(linear("key", x)), heads(linear("value", x))
    k = observe(k - k.mean(-2, keepdim=True))  # copies count as often as they are there: any mean does not matter
    if "key_offset" in w:
        k = observe(k + w["key_offset"].reshape(block.heads, 1, -1))
    shift = w["score_shift"][:, None, None] if "score_shift" in w else 0.0
    powers = observe(block.exponential.evaluate(q @ k.transpose(-1, -2) + shift))
    c = torch.from_numpy(block.inverse_scales)[:, None, None]
    sums = observe((powers * mask[:, None, None]).sum(-1, keepdim=True) * c)
    inverses = observe(block.inverse.evaluate_folded(sums * block.inverse.fold[0]) * (c / block.inverse.start))
    weights = observe(powers * inverses)
    mixed = observe(weights @ (v * mask[:, None, :, None]))
    z = norm(
        observe(linear("residual", x) + linear("output", mixed.transpose(1, 2).reshape(n, places, d))), block.norms[0]
    )
    hidden = observe(block.gelu.evaluate(linear("up", z)))
    out = norm(observe(linear("skip", z) + linear("down", hidden)), block.norms[1])
    return out, most if math.isfinite(most) else math.inf
