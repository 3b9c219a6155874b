"""What a polynomial student becomes for encrypted computation: its blocks as matrices and polynomials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedfm.encrypted.student.neuron_polynomials import NeuronCore, NeuronGelu
from fedfm.encrypted.student.polynomials import Exponential, Inverse, InverseSquareRoot, Quadratic

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class FoldedBlock:
    """Computes z = x + W_o attention(norm(x)), and then z + W_2 gelu(W_1 norm(z)), for centred x.

    Attributes:
        weights: ``query``, ``key``, ``value``, ``output`` (d, d), ``up`` (m, d), ``down`` (d, m), and the
            same names with ``_bias``, all in float64. The query includes the factor of the scores. If they are there,
            ``key_offset`` (d,) is added to the centred keys, ``score_shift`` (heads,) to the scores, and ``skip``
            (d, d) maps the MLP's input to what is added to its output.
        norms: polynomials for 1 / sqrt of the variance, before the attention and before the MLP.
        exponential, inverse, gelu: the polynomials for exp, for 1 / x of the row sums of exp, and for GELU.
        inverse_scales: (heads,), factors that multiply the row sums before ``inverse`` is applied, and then the
            results of ``inverse``.
        centred_keys: whether the mean over the places is subtracted from the keys.
    """

    weights: Mapping[str, Matrix]
    heads: int
    norms: tuple[InverseSquareRoot | Inverse, InverseSquareRoot | Inverse]
    exponential: Exponential
    inverse: Inverse
    inverse_scales: Matrix
    gelu: Quadratic | NeuronCore
    centred_keys: bool = True


@dataclass(frozen=True)
class Folded:
    """A polynomial student as a map from images to the block outputs b_1 .. b_L.

    Attributes:
        embedding: (d, F), maps a token's pixels to its features; ``bias`` (d,), ``positions`` (T, d).
        scales: (L,), divisors of the disclosed b_l: the root mean square of each b_l on the distillation data.
        ranges: (L,), the largest possible ``|b_l|`` before the division; a larger value means that arithmetic failed.
        bound: the largest magnitude of any intermediate value, if arguments are inside the student's intervals.
        patch: maps pixel_values (n, 3, H, W) to the client's input (n, T, F); class tokens have zeros.
        class_token: whether token 0 is a class token.
    """

    embedding: Matrix
    bias: Matrix
    positions: Matrix
    blocks: tuple[FoldedBlock, ...]
    scales: Matrix
    ranges: Matrix
    bound: float
    patch: Callable[[Tensor], Tensor]
    class_token: bool = False


def fold_neurons(weights: dict[str, Matrix], gelu: NeuronGelu) -> None:
    """Fold centres, scales and factors of the neurons into the MLP's maps, and their linear terms into one map."""
    up, bias, down = weights["up"], weights["up_bias"], weights["down"]
    weights["skip"] = (down * gelu.slopes) @ up
    weights["skip_bias"] = down @ (gelu.slopes * bias + gelu.constants)
    weights["up"], weights["up_bias"] = up / gelu.scales[:, None], (bias - gelu.centres) / gelu.scales
    weights["down"] = down * gelu.factors


def array_of(x: Tensor) -> Matrix:
    """Return a tensor as an array of its own, in float64."""
    return np.asarray(x.detach().cpu().double().numpy().copy(), dtype=np.float64)


def centre_rows(x: Matrix) -> Matrix:
    """Subtract the mean over features, the first axis."""
    centred: Matrix = x - x.mean(0)
    return centred
