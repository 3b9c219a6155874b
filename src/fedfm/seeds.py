"""Randomness from one seed: every stream is derived from (seed, what it is for), never from an order of events."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(0, "batches", round, client)``.

    Independent of the platform, of the number of workers and of whatever was drawn before.
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """NumPy generator of the derived seed (PCG64, the same on every platform)."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))
