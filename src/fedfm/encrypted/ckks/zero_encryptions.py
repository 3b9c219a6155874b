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

from fedfm.encrypted.ckks import noise_kernels
from fedfm.encrypted.ckks.ring import Parameters, Residues, Ring
from fedfm.privacy.crypto import keys

_AT_A_TIME = 8  # number of encryptions whose random numbers are drawn at a time, so that they stay in the cache


def words(count: int, degree: int) -> NDArray[np.uint64]:
    """Draw uniform words of 64 bits, (count, N)."""
    stream = Cipher(AES256(keys.entropy(32)), CTR(bytes(16))).encryptor().update(bytes(8 * count * degree))
    return np.frombuffer(bytearray(stream), "<u8").astype(np.uint64, copy=False).reshape(count, degree)


def errors(count: int, degree: int) -> NDArray[np.int64]:
    """Draw the coefficients of the errors, (count, N)."""
    out = np.empty((count, degree), np.int64)
    noise_kernels.errors(words(count, degree), out)
    return out


def ternary(count: int, degree: int) -> NDArray[np.int64]:
    """Draw coefficients -1, 0 and 1, (count, N); their bias is 2^-64, since 2^64 is not a multiple of three."""
    out = np.empty((count, degree), np.int64)
    noise_kernels.ternary(words(count, degree), out)
    return out


def public_encryptions(public: Residues, count: int, limbs: int, ring: Ring, plus: Residues | None = None) -> Residues:
    """Make encryptions (count, 2, limbs, N) under a public key (2, primes, N): of zero, or of coefficients ``plus``.

    ``plus`` is (count, limbs, N).
    """
    degree = ring.degree
    out = np.empty((count, 2, limbs, degree), np.int64)
    nothing = np.empty((0, limbs, degree), np.int64)
    for start in range(0, count, _AT_A_TIME):
        piece = slice(start, min(start + _AT_A_TIME, count))
        rows = piece.stop - start
        noise = np.stack([errors(rows, degree), errors(rows, degree)])
        added = nothing if plus is None else plus[piece]
        noise_kernels.encrypt(ternary(rows, degree), noise, added, public, out[piece], ring.primes, ring.roots)
    return out


def uniform(seed: bytes, count: int, limbs: int, parameters: Parameters) -> Residues:
    """Make uniform residues (count, limbs, N) from a public seed of 32 bytes, at the sender and at the receiver.

    The residues are words of an AES-256-CTR stream, each with as many bits as the prime. Words that are too large are
    skipped. Use a seed only once.
    """
    out = np.empty((count, limbs, parameters.degree), np.int64)
    zeros, drawn = bytes(8 * parameters.degree), bytearray(8 * parameters.degree + 15)  # room that CTR asks for
    found = np.frombuffer(drawn, "<u8", parameters.degree)
    for i in range(count):
        stream = Cipher(AES256(seed), CTR(i.to_bytes(8, "big") + bytes(8))).encryptor()
        for limb in range(limbs):
            prime, kept, mask = parameters.primes[limb], 0, np.uint64((1 << parameters.bits[limb]) - 1)
            while kept < parameters.degree:
                stream.update_into(zeros, drawn)
                kept = noise_kernels.keep_below(found.astype(np.uint64, copy=False), mask, prime, out[i, limb], kept)
    return out
