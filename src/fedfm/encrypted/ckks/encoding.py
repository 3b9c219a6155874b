"""Encode slots as polynomials: the canonical embedding of CKKS, rounded to integer coefficients.

Slot j of a polynomial m is m(zeta^(3^j)), where zeta is a primitive 2N-th root of unity. Real slots give real
coefficients.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks.ring import Residues, Ring
from fedfm.errors import InputError

_LARGEST = 2.0**62  # coefficients are below this, so that int64 can store them


@lru_cache(maxsize=4)
def _places(degree: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.complex128]]:
    """Return (the slots' roots, their conjugates) as indexes into the odd powers of zeta, and powers of zeta."""
    exponent, exponents = 1, []
    for _ in range(degree // 2):
        exponents.append(exponent)
        exponent = exponent * 3 % (2 * degree)
    odd = np.array(exponents, np.int64)
    return (odd - 1) // 2, (2 * degree - odd - 1) // 2, np.exp(1j * np.pi / degree * np.arange(degree))


def encode(values: NDArray[np.floating[Any]], scale: float, degree: int) -> NDArray[np.int64]:
    """Encode real slots (count, N / 2) as integer coefficients (count, N) of ``scale`` times the polynomial.

    Raises:
        InputError: the number of slots is wrong, a value is not finite, or a coefficient is 2^62 or more.
    """
    if values.ndim != 2 or values.shape[1] != degree // 2:
        raise InputError(f"values of shape {values.shape}: expected (count, {degree // 2})")
    if not np.isfinite(values).all():
        raise InputError("values must be finite to be encrypted")
    at, mirrored, powers = _places(degree)
    spectrum = np.zeros((len(values), degree), np.complex128)
    spectrum[:, at] = values
    spectrum[:, mirrored] = values
    coefficients = (np.fft.fft(spectrum, axis=1) * powers.conj()).real * (scale / degree)
    if np.abs(coefficients).max(initial=0.0) >= _LARGEST:
        raise InputError(f"values up to {np.abs(values).max():.3g} are too large for scale 2^{math.log2(scale):.0f}")
    return np.rint(coefficients).astype(np.int64)


def decode(coefficients: NDArray[np.int64], scale: float) -> NDArray[np.float64]:
    """Invert :func:`encode`, apart from its rounding: (count, N) -> (count, N / 2)."""
    return np.ascontiguousarray(decode_complex(coefficients, scale).real)


def decode_complex(coefficients: NDArray[np.int64], scale: float) -> NDArray[np.complex128]:
    """Decode slots with their imaginary parts, (count, N) -> (count, N / 2)."""
    degree = coefficients.shape[1]
    at, _, powers = _places(degree)
    return np.asarray(np.fft.ifft(coefficients * powers, axis=1)[:, at] * (degree / scale))


def to_residues(coefficients: NDArray[np.int64], limbs: int, ring: Ring) -> Residues:
    """Transform integer coefficients (count, N) to evaluation form (count, limbs, N)."""
    return ring.forward(modulo(coefficients, limbs, ring))


def modulo(coefficients: NDArray[np.int64], limbs: int, ring: Ring) -> Residues:
    """Reduce integer coefficients (count, N) modulo each prime: (count, limbs, N)."""
    return np.stack([coefficients % q for q in ring.primes[:limbs]], axis=1)


def to_coefficients(residues: Residues, ring: Ring) -> NDArray[np.int64]:
    """Transform evaluation form (count, limbs, N) to centred integer coefficients (count, N).

    Raises:
        InputError: a coefficient is 2^63 or more, because the key is wrong or the values exceed the modulus.
    """
    limbs = residues.shape[1]
    x = ring.backward(residues.copy())
    if limbs == 1:
        q = int(ring.primes[0])
        return np.where(x[:, 0] > q // 2, x[:, 0] - q, x[:, 0])
    before, half, digits = ring.mixed_radix(x)
    # Sums modulo 2^64 are exact if the result fits into int64. It fits if it has the same residues as the input.
    whole = np.full(digits[:, 0].shape, (-half) % 2**64, np.uint64)
    for k in range(limbs):
        whole += digits[:, k].view(np.uint64) * np.uint64(before[k] % 2**64)
    found = whole.view(np.int64)
    if not all(np.array_equal(found % q, x[:, k]) for k, q in enumerate(ring.primes[:limbs])):
        raise InputError("decrypted values are out of range: the key is wrong, or the values exceed the modulus")
    return found
