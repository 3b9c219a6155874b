"""Random streams. Each stream depends only on the run's seed and its purpose, never on the order of events."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(0, "batches", round, client)``.

    The seed does not depend on the platform, the number of workers or earlier draws.
    """
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """A NumPy generator (PCG64, the same on every platform) with the derived seed."""
    return np.random.Generator(np.random.PCG64(derive(seed, *purpose)))
