"""Fresh encryptions of zero. This module draws the random polynomials itself, since SEAL takes several times as long.

Errors are centred binomial sums of 42 bits, as in SEAL (standard deviation 3.24, above the 3.2 of the Homomorphic
Encryption Standard). The public key is multiplied by a ternary polynomial. All bits come from an AES-256-CTR stream,
whose key is drawn from the system's entropy and used once.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from fedfm.encrypted.ckks.ring import Parameters, Residues, Ring
from fedfm.privacy.crypto import keys

_HALF = 21  # number of bits in each of the two sums


def words(count: int, degree: int) -> NDArray[np.uint64]:
    """Draw uniform words of 64 bits, (count, N)."""
    stream = Cipher(AES256(keys.entropy(32)), CTR(bytes(16))).encryptor().update(bytes(8 * count * degree))
    return np.frombuffer(stream, "<u8").astype(np.uint64, copy=False).reshape(count, degree)


def errors(count: int, degree: int) -> NDArray[np.int64]:
    """Draw the coefficients of the errors, (count, N)."""
    found, mask = words(count, degree), np.uint64((1 << _HALF) - 1)
    plus = np.bitwise_count(found & mask).astype(np.int64)
    minus = np.bitwise_count((found >> np.uint64(_HALF)) & mask).astype(np.int64)
    out: NDArray[np.int64] = plus - minus
    return out


def ternary(count: int, degree: int) -> NDArray[np.int64]:
    """Draw coefficients -1, 0 and 1, (count, N); their bias is 2^-64, since 2^64 is not a multiple of three."""
    return (words(count, degree) % np.uint64(3)).astype(np.int64) - 1


def spread(small: NDArray[np.int64], limbs: int, ring: Ring) -> Residues:
    """Transform small integer coefficients (count, N) to evaluation form, (count, limbs, N)."""
    negative = small < 0
    rows = [np.where(negative, small + q, small) for q in ring.primes[:limbs]]
    return ring.forward(np.stack(rows, axis=1))


def public_zeros(public: Residues, count: int, limbs: int, ring: Ring) -> Residues:
    """Make encryptions of zero (count, 2, limbs, N) under a public key (2, primes, N)."""
    degree = ring.degree
    out = np.empty((count, 2, limbs, degree), np.int64)
    factor = spread(ternary(count, degree), limbs, ring)
    for polynomial in range(2):
        key = np.ascontiguousarray(np.broadcast_to(public[polynomial, :limbs], factor.shape))
        out[:, polynomial] = ring.dyadic(factor, key, spread(errors(count, degree), limbs, ring))
    return out


def add_errors(coefficients: Residues, error: NDArray[np.int64], ring: Ring) -> Residues:
    """Add small errors (count, N) to coefficients (count, limbs, N)."""
    out = np.empty_like(coefficients)
    for limb, q in enumerate(ring.primes[: coefficients.shape[1]]):
        x = coefficients[:, limb] + error
        out[:, limb] = np.where(x < 0, x + q, np.where(x >= q, x - q, x))
    return out


def uniform(seed: bytes, count: int, limbs: int, parameters: Parameters) -> Residues:
    """Make uniform residues (count, limbs, N) from a public seed of 32 bytes, at the sender and at the receiver.

    The residues are words of an AES-256-CTR stream, each with as many bits as the prime. Words that are too large are
    skipped. Use a seed only once.
    """
    out = np.empty((count, limbs, parameters.degree), np.int64)
    for i in range(count):
        for limb in range(limbs):
            prime, bits = parameters.primes[limb], parameters.bits[limb]
            counter = (i * limbs + limb).to_bytes(8, "big") + bytes(8)
            stream = Cipher(AES256(seed), CTR(counter)).encryptor()
            found = np.empty(0, np.uint64)
            while len(found) < parameters.degree:
                words = np.frombuffer(stream.update(bytes(8 * parameters.degree)), "<u8") & np.uint64((1 << bits) - 1)
                found = np.concatenate([found, words[words < prime]])
            out[i, limb] = found[: parameters.degree]
    return out
