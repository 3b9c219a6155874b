"""Sums of products of ciphertexts, which are relinearised once for each sum."""

from __future__ import annotations

import numpy as np

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, factors
from fedfm.errors import InputError


def inner(a: Ciphertexts, b: Ciphertexts) -> Ciphertexts:
    """Return the sum of a_i b_i as one ciphertext with three polynomials."""
    if len(a) != len(b):
        raise InputError(f"{len(a)} and {len(b)} ciphertexts in an inner product")
    x, y = factors(a, b)
    out = np.empty((1, 3, *x.limbs.shape[2:]), np.int64)
    x.evaluator.ring.tensor(x.residues, y.residues, out[0])
    return Ciphertexts(out.view(np.uint64), x.scale * y.scale, x.evaluator)


def outer(a: Ciphertexts, b: Ciphertexts, terms: int, *, first: bool = True, last: bool = True) -> Ciphertexts:
    """Return the sums of products for each pair of a row of a and a row of b, with three polynomials each.

    Both arrays are matrices (rows, ``terms``) of ciphertexts, row after row; ``first = False`` says that a is stored
    column after column, ``last = False`` that b is. The result is a matrix (rows of a, rows of b), row after row.
    """
    if len(a) % terms or len(b) % terms:
        raise InputError(f"{len(a)} and {len(b)} ciphertexts in products of rows of {terms}")
    x, y = factors(a, b)
    m, n = len(x) // terms, len(y) // terms
    steps = (m, n, terms, *((terms, 1) if first else (1, m)), *((terms, 1) if last else (1, n)))
    out = np.empty((m * n, 3, *x.limbs.shape[2:]), np.int64)
    x.evaluator.ring.outer(x.residues, y.residues, steps, out)
    return Ciphertexts(out.view(np.uint64), x.scale * y.scale, x.evaluator)
