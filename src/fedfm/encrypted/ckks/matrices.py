"""Products of matrices with arrays of ciphertexts, computed on residues."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import modular_kernels
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.ring import Residues, Ring
from fedfm.errors import InputError

_COLUMNS = 2048  # number of columns that are computed at a time, so that the pieces stay in the cache


def linear(
    weight: NDArray[np.floating[Any]], x: Ciphertexts, bias: NDArray[np.floating[Any]] | None = None
) -> Ciphertexts:
    """Compute W x + b for an array of n ciphertexts, and rescale the result: (m, n), (n,), (m,) -> (m,).

    The entries of W become integers at the scale of a narrow prime. The residues are cut into pieces with so few bits
    that a float64 matrix product with W is exact. If a row of W is zero, an encryption of zero is added to its result;
    otherwise anyone could read the result.

    Raises:
        InputError: the shapes do not match, or an entry is not finite.
    """
    if weight.ndim != 2 or weight.shape[1] != len(x) or (bias is not None and bias.shape != weight.shape[:1]):
        raise InputError(f"a matrix of shape {weight.shape} does not match {len(x)} ciphertexts")
    if not np.isfinite(weight).all():
        raise InputError("the matrix has entries that are not finite")
    x = x.for_plain()
    scale = x.plain_scale()
    rounded = np.rint(weight.astype(np.float64) * scale)
    out = matrix_product(rounded, x.residues, x.evaluator.ring)
    if len(empty := np.flatnonzero(~rounded.any(axis=1))):
        out[empty] = x.evaluator.zeros(len(empty), x.level + 1)
    y = Ciphertexts(out.view(np.uint64), x.scale * scale, x.evaluator)
    return x.evaluator.rescale(y if bias is None else y.plus(np.asarray(bias, np.float64)))


def matrix_product(rounded: NDArray[np.float64], x: Residues, ring: Ring) -> Residues:
    """Multiply integers and residues exactly: (m, n), (n, polynomials, primes, N) -> (m, polynomials, primes, N).

    Raises:
        InputError: the sum of the magnitudes in a row is too large for exact pieces.
    """
    count, polynomials, limbs, degree = x.shape
    out = np.empty((len(rounded), polynomials, limbs, degree), np.int64)
    room = 53 - math.ceil(math.log2(np.abs(rounded).sum(axis=1).max(initial=1.0) + 1))
    if room < 8:
        raise InputError("the entries of a matrix are too large for an exact product")
    width = min(_COLUMNS, degree)
    for limb in range(limbs):
        q = int(ring.primes[limb])
        pieces = -(-q.bit_length() // room)
        shift = -(-q.bit_length() // pieces)
        cut, product = np.empty((pieces, count, width)), np.empty((pieces, len(rounded), width))
        for polynomial in range(polynomials):
            source, target = x[:, polynomial, limb], out[:, polynomial, limb]
            for start in range(0, degree, width):
                modular_kernels.split(source, start, shift, cut)
                for piece in range(pieces):
                    np.matmul(rounded, cut[piece], out=product[piece])
                modular_kernels.join(product, start, shift, q, target)
    return out
