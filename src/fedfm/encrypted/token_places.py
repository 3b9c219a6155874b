"""Places of tokens in a ciphertext: their number is a power of two, and the first tokens fill those that are left."""

from __future__ import annotations


def places_of(tokens: int) -> int:
    """Return the smallest power of two that is at least ``tokens``."""
    return 1 << (tokens - 1).bit_length()
