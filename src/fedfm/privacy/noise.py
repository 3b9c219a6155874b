"""Normal noise from a secret key: noise that protects records must not come from a generator with a guessable state.

HKDF-SHA256 derives a subkey for each purpose, ChaCha20 its stream, Box-Muller the normals. The same key, purpose and
shape give the same numbers, so an interrupted run repeats its noise instead of averaging it away.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.errors import InputError

Array = NDArray[np.float64]

_LEAST_KEY = 16  # bytes
_GRID_BITS = 20  # the lattice of a release has steps of about sigma / 2^20: below the noise, far above a float's


def gaussian(key: bytes, purpose: str, shape: tuple[int, ...]) -> Array:
    """Standard normals, float64, of this shape.

    Streams of two purposes, or of two shapes, are independent. Use a purpose for one release only: the same noise on
    two data sets reveals their difference.

    The radius takes 64 random bits: the tails are cut at 9.5, beyond which a normal number has mass 1e-20.

    Args:
        key: secret; only its owner keeps it.
        purpose: what the noise is for, e.g. ``"c3/moments/7"``.

    Raises:
        InputError: the key is shorter than 16 bytes.

    Example:
        >>> bool((gaussian(bytes(32), "a", (3,)) == gaussian(bytes(32), "a", (3,))).all())
        True
    """
    size = math.prod(shape)
    pairs = -(-size // 2)
    words = np.frombuffer(stream(key, f"{purpose}\x1f{tuple(map(int, shape))}", 16 * pairs), dtype="<u8")
    # A small 64-bit word keeps its low bits as a float: there the logarithm needs them.
    radius = np.sqrt(-2 * np.log((words[:pairs].astype(np.float64) + 0.5) * 2.0**-64))
    angle = (2 * math.pi * 2.0**-53) * (words[pairs:] >> np.uint64(11)).astype(np.float64)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size].reshape(shape)


def packed(key: bytes, purpose: str, d: int) -> Array:
    """The lower triangle, row by row, of symmetric noise: (d (d + 1) / 2,), float64.

    The diagonal has the standard deviation 1, the other entries 1/sqrt(2). This is independent noise on the vector
    (M_jj, sqrt(2) M_jk), whose L2 distance is the Frobenius distance of the matrices. Arguments as of :func:`gaussian`.
    """
    row, column = np.tril_indices(d)
    return gaussian(key, purpose, (len(row),)) * np.where(row == column, 1.0, math.sqrt(0.5))


def unpack(lower: Array, d: int) -> Array:
    """The symmetric matrix (d, d) of a packed lower triangle (d (d + 1) / 2,)."""
    out = np.zeros((d, d))
    row, column = np.tril_indices(d)
    out[row, column] = out[column, row] = lower
    return out


def on_grid(values: Array, sigma: float) -> Array:
    """Round ``values`` to a lattice whose step, a power of two, depends on sigma alone.

    The last bits of (float + float noise) reveal the float (Mironov 2012); each lattice point stands for many floats.
    """
    step = 2.0 ** (math.frexp(sigma)[1] - _GRID_BITS)
    return np.asarray(np.round(values / step) * step)


def stream(key: bytes, purpose: str, length: int) -> bytes:
    """``length`` bytes of the ChaCha20 stream of this purpose under the key."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    if len(key) < _LEAST_KEY:
        raise InputError(
            f"a noise key has {len(key)} bytes; it needs at least {_LEAST_KEY}, e.g. secrets.token_bytes(32)"
        )
    subkey = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"fedfm noise 1\x1f" + purpose.encode()).derive(key)
    # Each subkey serves one stream, so a constant nonce is safe.
    cipher: Any = Cipher(algorithms.ChaCha20(subkey, bytes(16)), mode=None).encryptor()
    return bytes(cipher.update(bytes(length)))
