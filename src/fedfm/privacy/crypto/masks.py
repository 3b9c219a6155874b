"""Masks: the AES-256-CTR keystream of a key, added to integers modulo 2^32 or 2^64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

_BLOCK = 1 << 17  # bytes of keystream that are made at a time: few enough to stay in the cache
_ZEROS = memoryview(bytes(_BLOCK))

Words = NDArray[np.unsignedinteger[Any]]


def add(vectors: Sequence[Words], key: bytes, *, negative: bool = False) -> None:
    """Add the stream of ``key`` to the vectors one after the other, in place; subtract it if ``negative``.

    The counter always starts at 0, so a key must mask one message only.
    """
    stream, block = Cipher(AES256(key), CTR(bytes(16))).encryptor(), bytearray(_BLOCK + 15)
    apply = np.subtract if negative else np.add
    for vector in vectors:
        little, length = vector.dtype.newbyteorder("<"), _BLOCK // vector.itemsize
        for start in range(0, len(vector), length):
            piece = vector[start : start + length]
            stream.update_into(_ZEROS[: piece.nbytes], block)
            apply(piece, np.frombuffer(block, little, len(piece)), out=piece)
