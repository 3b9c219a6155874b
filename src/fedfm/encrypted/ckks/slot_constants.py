"""Sums and products of ciphertexts with plaintexts that have a different value in each slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import encoding
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.ring import Residues, Ring
from fedfm.errors import InputError


def encode_slots(values: NDArray[np.floating[Any]], limbs: int, scale: float, ring: Ring) -> Residues:
    """Encode real slots (count, N / 2) as polynomials in evaluation form, (count, limbs, N)."""
    return encoding.to_residues(encoding.encode(np.asarray(values, np.float64), scale, ring.degree), limbs, ring)


def plus_slots(x: Ciphertexts, values: NDArray[np.floating[Any]]) -> Ciphertexts:
    """Add a separate value to each slot of each ciphertext: (count,), (count, N / 2) -> (count,).

    Raises:
        InputError: the number of ciphertexts or slots is wrong.
    """
    if len(values) != len(x):
        raise InputError(f"{len(values)} rows of values for {len(x)} ciphertexts")
    ring = x.evaluator.ring
    out = x.residues.copy()
    plain = encode_slots(values, x.level + 1, x.scale, ring)
    out[:, 0] = ring.add(np.ascontiguousarray(out[:, 0]), plain)
    return Ciphertexts(out.view(np.uint64), x.scale, x.evaluator)


def times_slots(x: Ciphertexts, plains: Residues, scale: float) -> Ciphertexts:
    """Multiply slot by slot: ciphertext i by plaintext i modulo k, (count,), (k, primes, N) -> (count,).

    The result is not rescaled: its scale is the scale of x times ``scale``, the scale of the plaintexts.

    Raises:
        InputError: the shapes do not match.
    """
    parts = [weighted_sum(x[[i]], plains[i % len(plains)][None], scale).residues for i in range(len(x))]
    return Ciphertexts(np.concatenate(parts).view(np.uint64), x.scale * scale, x.evaluator)


def weighted_sum(x: Ciphertexts, plains: Residues, scale: float) -> Ciphertexts:
    """Return the sum over i of x_i times plaintext i, slot by slot: (count,), (count, primes, N) -> one ciphertext.

    The result is not rescaled: its scale is the scale of x times ``scale``, the scale of the plaintexts.

    Raises:
        InputError: the shapes do not match.
    """
    ring, (_, polynomials, limbs, degree) = x.evaluator.ring, x.limbs.shape
    if plains.shape != (len(x), limbs, degree):
        raise InputError(f"plaintexts {plains.shape} for {len(x)} ciphertexts of {limbs} primes")
    out = np.empty((1, polynomials, limbs, degree), np.int64)
    ring.weave(x.residues, plains, out[0])
    return Ciphertexts(out.view(np.uint64), x.scale * scale, x.evaluator)
