"""Normal noise from a secret key. Noise that protects records must not come from a generator whose state can be
guessed.

HKDF-SHA256 derives a subkey for each purpose. ChaCha20 expands it to a stream, and the Box-Muller transform turns the
stream into normal numbers. The same key, purpose and shape give the same numbers. So an interrupted run repeats its
noise, which then cannot be averaged away.

*The same noise never covers two different numbers.* :func:`cover` puts a digest of the numbers, of their shape and of
the noise's standard deviation into the purpose. Numbers that differ in one bit get independent streams, so no
difference of two releases is free of noise. Equal numbers get the same noise again, so a repetition discloses nothing
new. Mechanisms add noise only by :func:`cover`. A second release with other numbers still spends privacy; the caller
decides whether to answer twice.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.errors import InputError

Array = NDArray[np.float64]

_LEAST_KEY = 16  # bytes
_GRID_BITS = 20  # a release's lattice has steps of about sigma / 2^20: far below the noise, far above float rounding
BLOCK = 1 << 20  # number of noise values that are made at a time


def cover(key: bytes, purpose: str, numbers: NDArray[Any], sigma: float | Array) -> NDArray[Any]:
    """The numbers plus normal noise that depends on them, in their shape.

    Integers (int64) get integer noise, so that the sum is exact. Floats plus noise are rounded to the lattice of
    :func:`on_grid`. Two floats that differ in the last bit are different numbers and share no noise.

    Args:
        key: a secret that only its owner has.
        purpose: purpose of the release, e.g. ``"c3/moments/7"``; releases of different meaning have different purposes.
        sigma: standard deviation, above 0: one value for all numbers, or an array with a value for each.

    Raises:
        InputError: the key is shorter than 16 bytes.

    Example:
        >>> a, b = (cover(bytes(32), "sum", np.array([x, 0]), 100.0) for x in (1, 2))
        >>> bool((a - b == [-1, 0]).any())
        False
    """
    whole = np.issubdtype(np.asarray(numbers).dtype, np.integer)
    numbers = np.asarray(numbers) if whole else np.asarray(numbers, np.float64) + 0.0  # -0.0 is the same number as 0.0
    flat, sigmas = numbers.reshape(-1), np.asarray(sigma, np.float64)
    where = f"{purpose}\x1f{digest(numbers, sigmas)}"
    out = np.empty_like(flat)
    for at in range(0, len(flat), BLOCK):
        part, scale = flat[at : at + BLOCK], sigmas.reshape(-1)[at : at + BLOCK] if sigmas.ndim else sigmas
        normals = scale * gaussian(key, f"{where}\x1f{at}", part.shape)
        out[at : at + BLOCK] = part + np.rint(normals).astype(part.dtype) if whole else on_grid(part + normals, scale)
    return out.reshape(numbers.shape)


def digest(*parts: NDArray[Any] | str) -> str:
    """SHA-256 over type, shape, length and bytes of arrays and texts, so that different parts never look alike."""
    found = hashlib.sha256()
    for part in parts:
        of = "text" if isinstance(part, str) else part.dtype.newbyteorder("<").str
        array = np.frombuffer(part.encode(), np.uint8) if isinstance(part, str) else np.ascontiguousarray(part)
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        found.update(f"{of}{array.shape}\x1f".encode())
        found.update(little.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def gaussian(key: bytes, purpose: str, shape: tuple[int, ...]) -> Array:
    """Standard normals, float64, of this shape.

    Streams of two purposes, or of two shapes, are independent. The same noise on two data sets reveals their
    difference: a mechanism adds noise by :func:`cover`, or puts everything that the noise covers into the purpose.

    The radius takes 64 random bits: the tails are cut at 9.5, beyond which a normal number has mass 1e-20.

    Args:
        key: a secret that only its owner has.
        purpose: purpose of the noise, e.g. ``"c3/moments/7"``.

    Raises:
        InputError: the key is shorter than 16 bytes.

    Example:
        >>> bool((gaussian(bytes(32), "a", (3,)) == gaussian(bytes(32), "a", (3,))).all())
        True
    """
    size = math.prod(shape)
    pairs = -(-size // 2)
    words = np.frombuffer(stream(key, f"{purpose}\x1f{tuple(map(int, shape))}", 16 * pairs), dtype="<u8")
    # The logarithm is steep near 0, so it needs every bit of a small word. A float64 holds all bits of a small word.
    radius = np.sqrt(-2 * np.log((words[:pairs].astype(np.float64) + 0.5) * 2.0**-64))
    angle = (2 * math.pi * 2.0**-53) * (words[pairs:] >> np.uint64(11)).astype(np.float64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size].reshape(shape)


def unit_rows(x: Array) -> Array:
    """Rows scaled to norm 1, float64; a zero row becomes e_1, so that every record has the same bound.

    Args:
        x: (n, d) features.

    Raises:
        InputError: x is not a matrix, or an entry is NaN or infinite.

    Example:
        >>> unit_rows(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
        [[0.6, 0.8], [1.0, 0.0]]
    """
    x = np.array(x, dtype=np.float64)
    if x.ndim != 2 or not x.shape[1]:
        raise InputError(f"features have shape {x.shape}; they must be (rows, features)")
    if not np.isfinite(x).all():
        raise InputError("features have a NaN or infinite entry: no norm bounds such a row")
    largest = np.abs(x).max(axis=1, initial=0.0)
    x[largest == 0, 0] = 1.0
    # Scale first, since the norm of tiny or huge entries would be 0 or inf.
    x /= np.where(largest == 0, 1.0, largest)[:, None]
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def packed_scale(d: int) -> Array:
    """Standard deviations of symmetric noise on a lower triangle, row by row: (d (d + 1) / 2,).

    The diagonal has 1, the other entries have 1/sqrt(2). This is independent noise on the vector (M_jj, sqrt(2) M_jk),
    whose L2 distance is the Frobenius distance of the matrices.
    """
    row, column = np.tril_indices(d)
    return np.where(row == column, 1.0, math.sqrt(0.5))


def unpack(lower: Array, d: int) -> Array:
    """The symmetric matrix (d, d) of a packed lower triangle (d (d + 1) / 2,)."""
    out = np.zeros((d, d))
    row, column = np.tril_indices(d)
    out[row, column] = out[column, row] = lower
    return out


def project(matrix: Array, floor: float) -> Array:
    """The nearest symmetric matrix, in the Frobenius norm, whose eigenvalues are at least ``floor``: (d, d)."""
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    nearest: Array = (vectors * np.maximum(values, floor)) @ vectors.T
    return 0.5 * (nearest + nearest.T)


def on_grid(values: Array, sigma: float | Array) -> Array:
    """Round ``values`` to a lattice whose step, a power of two, depends on sigma alone.

    The last bits of (float + float noise) reveal the float (Mironov 2012); each lattice point represents many floats.
    """
    step = np.ldexp(1.0, np.frexp(sigma)[1] - _GRID_BITS)
    return np.asarray(np.round(values / step) * step)


def stream(key: bytes, purpose: str, length: int) -> bytes:
    """``length`` bytes of the ChaCha20 stream of this purpose and length under the key.

    The length is part of the purpose: a shorter stream is not the beginning of a longer one.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(key) < _LEAST_KEY:
        raise InputError(
            f"a noise key has {len(key)} bytes; it needs at least {_LEAST_KEY}, e.g. secrets.token_bytes(32)"
        )
    info = f"fedfm noise 2\x1f{length}\x1f{purpose}".encode()
    subkey = HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(key)
    # Each subkey serves one stream, so a constant nonce is safe.
    cipher: Any = Cipher(algorithms.ChaCha20(subkey, bytes(16)), mode=None).encryptor()
    return bytes(cipher.update(bytes(length)))
