"""Sums and pairs of products of ciphertexts, which are relinearised once for each sum or pair."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, factors, products, relinearise_and_rescale
from fedfm.errors import InputError

_PAIRS = 4  # number of pairs that are computed at a time, so that their products stay in the cache


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


def product_pairs(a: Ciphertexts, b: Ciphertexts, which: Sequence[int] | None = None) -> Ciphertexts:
    """Return the products a_i b_i as pairs, as :meth:`Ciphertexts.pair` makes them, relinearised and rescaled.

    A product with u = X^(N/2) needs no key, so the products are paired before, and half as many are relinearised.

    Args:
        which: for each ciphertext of a, the index of its factor in b; None for the same index.

    Returns:
        (ceil(count / 2),), for a of (count,).
    """
    x, y = factors(a, b)
    which = range(len(x)) if which is None else which
    if len(which) != len(x):
        raise InputError(f"{len(which)} factors for {len(x)} ciphertexts")
    half, (_, _, limbs, degree) = (len(x) + 1) // 2, x.limbs.shape
    out, scale = np.empty((half, 2, limbs - 1, degree), np.int64), 1.0
    for start in range(0, half, _PAIRS):
        firsts = range(start, min(start + _PAIRS, half))
        rows = [*firsts, *(half + i for i in firsts if half + i < len(x))]
        wide = np.empty((len(rows), 3, limbs, degree), np.int64)
        for i, target in zip(rows, wide, strict=True):
            k = which[i]
            x.evaluator.ring.tensor(x.residues[i : i + 1], y.residues[k : k + 1], target)
        both = Ciphertexts(wide.view(np.uint64), x.scale * y.scale, x.evaluator).pair()
        done = x.evaluator.relinearise_and_rescale(both)
        out[start : firsts.stop], scale = done.residues, done.scale
    return Ciphertexts(out.view(np.uint64), scale, x.evaluator)


def raw_square(x: Ciphertexts) -> Ciphertexts:
    """Return squares with three polynomials, not rescaled, for sums or :func:`reduce_for_product`."""
    return products(x, x)


def square_again(x: Ciphertexts) -> Ciphertexts:
    """Return squares that have a level for another product: (count,) -> (count,).

    If they have to be refreshed for it, they become pairs before they are relinearised.
    """
    x, _ = factors(x, x)
    if _has_product_after(x):
        return x.square()
    return product_pairs(x, x).refresh_pairs().unpair(len(x))


def reduce_for_product(x: Ciphertexts, refreshed: bool = False) -> Ciphertexts:
    """Relinearise and rescale unreduced products, as :func:`square_again` does: (count,) -> (count,).

    Args:
        x: products with three polynomials; others stay as they are.
        refreshed: whether the result is refreshed in any case.
    """
    if x.limbs.shape[1] == 2:
        return x.refresh() if refreshed else x
    if not refreshed and _has_product_after(x):
        return relinearise_and_rescale(x)
    return relinearise_and_rescale(x.pair()).refresh_pairs().unpair(len(x))


def _has_product_after(x: Ciphertexts) -> bool:
    """Whether a product that is rescaled by the last prime of x has a level for another one, or nobody refreshes it."""
    evaluator = x.evaluator
    levels = range(x.level, max(evaluator.floor, 1), -1)
    return evaluator.refresh is None or any(evaluator.ring.parameters.wide(limbs) for limbs in levels)
