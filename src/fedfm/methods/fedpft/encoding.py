"""A client's mixtures in a message: one tensor, one scale, and the number of components of each mixture.

In float16 a variance below 6e-8 underflows and one above 65,504 overflows. A rounded covariance matrix may lose its
positive eigenvalues. So clients send standard deviations, or for full covariances Cholesky factors, whose product
stays positive after rounding. Means and standard deviations are divided by one power of two, so that the largest value
is just below 32,768. This allows means beyond 65,504, and standard deviations a billion times smaller than the largest
mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedfm.core.federation import MAX_NORM
from fedfm.errors import E_DTYPE, E_FIELD, E_NONFINITE, E_NORM, E_SHAPE, E_SIZE, E_WEIGHT, ClientFault
from fedfm.methods.fedpft.mixtures.mixture import COVARIANCES, Array, Mixture

LARGEST = 15  # scaled numbers are below 2**15, float16's largest is just below 2**16
MAX_DIM = 1 << 20  # no backbone's features are wider
# Largest root mean square L2 norm of a mixture's rows. Other methods send sums of squares, whose norm is at most
# MAX_NORM, so the norm of their rows is at most MAX_ROW, too. With such rows, sums of squares stay within float32.
MAX_ROW = math.sqrt(MAX_NORM)
ROUNDED = 1e-2  # float16 rounds each weight by 2**-11 of its value; the weights' sum may deviate from 1 by this much
DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Packed:
    """All mixtures of one client in sequence: weights (K), means (K, d), scales.

    Attributes:
        components: K of each mixture.
        covariance: ``"spherical"``, ``"diag"`` or ``"full"``, of all mixtures.
        dim: d.
        scale: a power of two by which means and standard deviations were divided.
        numbers: tensor of one dimension, float16 or float32, with :func:`formula_numbers` values for each mixture. For
            a full covariance these include the lower triangle of the Cholesky factor, row by row.
    """

    components: list[int]
    covariance: str
    dim: int
    scale: float
    numbers: torch.Tensor


def formula_numbers(covariance: str, d: int, k: int) -> int:
    """Number of values in a mixture of K components in d dimensions, equations (10) to (12).

    full (2d + (d^2 - d)/2 + 1)K, diag (2d + 1)K, spherical (d + 2)K.

    Example:
        >>> [3 * formula_numbers(c, 4, 2) for c in ("full", "diag", "spherical")]
        [90, 54, 36]
    """
    return {"spherical": d + 2, "diag": 2 * d + 1, "full": 2 * d + (d * d - d) // 2 + 1}[covariance] * k


def pack(mixtures: Sequence[Mixture], dtype: str) -> Packed:
    """Pack the mixtures for a message, in ``"float16"`` or ``"float32"``.

    A standard deviation too small for the type becomes the type's smallest positive number, not 0.

    Raises:
        ValueError: there is no mixture, the mixtures differ in covariance or dimension, or one is invalid
            (:meth:`Mixture.check`).
    """
    kinds = {(m.covariance, m.dim) for m in mixtures}
    if len(kinds) != 1:
        raise ValueError(f"expected mixtures of one covariance and dimension, got {sorted(kinds)}")
    for m in mixtures:
        m.check()
    ((covariance, d),) = kinds
    largest = max(max(float(np.abs(m.means).max()), float(np.abs(m.scales).max())) for m in mixtures)
    scale = 2.0 ** max(math.frexp(largest)[1] - LARGEST, -126)  # a normal float32
    kind = np.dtype(dtype)
    tiny = float(np.finfo(kind).smallest_subnormal)
    parts: list[Array] = []
    for m in mixtures:
        scales = m.scales / np.float64(scale)
        if covariance == "full":
            diagonal = np.einsum("kjj->kj", scales)  # a view
            np.maximum(diagonal, tiny, out=diagonal)
            scales = scales[(slice(None), *np.tril_indices(d))]  # (K, (d^2 + d)/2)
        else:
            scales = np.maximum(scales, tiny)
        parts += [m.weights, (m.means / np.float64(scale)).ravel(), scales.ravel()]
    numbers = torch.from_numpy(np.concatenate(parts).astype(kind))
    return Packed([m.components for m in mixtures], covariance, d, scale, numbers)


def nothing(covariance: str, d: int, dtype: str) -> Packed:
    """The message of a client without mixtures. ``covariance``, ``d`` and ``dtype`` are those of the other clients.

    Example:
        >>> unpack(nothing("diag", 4, "float16"))
        []
    """
    return Packed([], covariance, d, 1.0, torch.empty(0, dtype=DTYPES[dtype]))


def unpack(packed: Packed) -> list[Mixture]:
    """Check and unpack the mixtures that a client sent; their weights are scaled to a sum of 1.

    Raises:
        ClientFault: E_FIELD, an unknown covariance; E_SIZE, zero or too many dimensions or components, or
            numbers without a mixture; E_DTYPE, another type; E_SHAPE, another count of numbers than the fields require;
            E_NONFINITE, NaN or infinity; E_WEIGHT, weights not on the simplex, or a scale or standard deviation that is
            not positive; E_NORM, rows whose root mean square norm is above :data:`MAX_ROW`.
    """
    scale, values = _fields(packed)
    covariance, d, out, at = packed.covariance, packed.dim, [], 0
    for i, k in enumerate(packed.components):
        size = formula_numbers(covariance, d, k)
        part = values[at : at + size].astype(np.float64)
        at += size
        with np.errstate(over="ignore"):
            weights, means, scales = part[:k], part[k : k + k * d] * scale, part[k + k * d :] * scale
        total = float(weights.sum())
        if weights.min() < 0 or abs(total - 1) > ROUNDED:
            raise ClientFault(E_WEIGHT, f"mixture {i}: weights are not on the simplex: they add up to {total:g}")
        with np.errstate(over="ignore"):
            small, wide = means.astype(np.float32), _scales(covariance, scales.astype(np.float32), k, d)
        mixture = Mixture(weights / total, small.reshape(k, d), wide)
        if not (np.isfinite(small).all() and np.isfinite(wide).all()):
            raise ClientFault(E_NONFINITE, f"mixture {i}: means or standard deviations are too large for float32")
        of_mean, of_scale = ((x.reshape(k, -1) ** 2).sum(1) for x in (means, scales))
        row = math.sqrt((of_mean + (d if covariance == "spherical" else 1) * of_scale).max())  # |mu|^2 + trace of Sigma
        if not row <= MAX_ROW:
            raise ClientFault(E_NORM, f"mixture {i}: rows of L2 norm {row:.3g}, above {MAX_ROW:.3g}")
        try:
            mixture.check()
        except ValueError as error:
            raise ClientFault(E_WEIGHT, f"mixture {i}: {error}") from None
        out.append(mixture)
    return out


def _scales(covariance: str, flat: Array, k: int, d: int) -> Array:
    """The scales in the shape of :class:`Mixture`."""
    if covariance == "spherical":
        return flat
    if covariance == "diag":
        return flat.reshape(k, d)
    out = np.zeros((k, d, d), np.float32)
    out[(slice(None), *np.tril_indices(d))] = flat.reshape(k, -1)
    return out


def _fields(packed: Packed) -> tuple[float, Array]:
    """Check scale and numbers, and return them; ``core.checks.conform`` has checked the types before."""
    if packed.covariance not in COVARIANCES:
        raise ClientFault(E_FIELD, f"covariance is none of {', '.join(COVARIANCES)}")
    numbers, d = packed.numbers.detach(), packed.dim
    if numbers.dtype not in DTYPES.values():
        raise ClientFault(E_DTYPE, f"numbers are {numbers.dtype}, expected float16 or float32")
    if numbers.layout is not torch.strided or numbers.device.type != "cpu" or numbers.ndim != 1:
        raise ClientFault(E_SHAPE, "numbers is not a plain tensor of one dimension")
    if (numbers.numel() and not packed.components) or not 1 <= d <= MAX_DIM:
        raise ClientFault(E_SIZE, f"{len(packed.components)} mixtures in {_short(d)} dimensions")
    if min(packed.components, default=1) < 1 or max(packed.components, default=0) > numbers.numel():
        raise ClientFault(E_SIZE, "a mixture with less than one component, or with more components than numbers")
    expected = sum(formula_numbers(packed.covariance, d, k) for k in packed.components)
    if numbers.numel() != expected:
        raise ClientFault(E_SHAPE, f"{numbers.numel()} numbers, expected {_short(expected)}")
    if not torch.isfinite(numbers).all():
        raise ClientFault(E_NONFINITE, "numbers hold NaN or infinity")
    try:
        scale = float(packed.scale)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise ClientFault(E_NONFINITE, "scale is NaN or infinite")
    if not scale > 0:
        raise ClientFault(E_WEIGHT, f"scale = {scale:g} is not positive")
    return scale, numbers.numpy()


def _short(n: int) -> str:
    """A client's number as a short text, since Python refuses to print very long integers."""
    return str(n) if abs(n) < 10**12 else "absurdly many"
