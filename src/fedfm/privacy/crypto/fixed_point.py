"""Real numbers as integers modulo 2^bits, such that sums of a known number of terms cannot overflow."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.privacy.crypto.masks import Words

_BLOCK = 1 << 15  # number of entries that are encoded at a time: few enough to stay in the cache


@dataclass(frozen=True)
class FixedPoint:
    """A code for numbers of magnitude at most ``bound``, of which at most ``terms`` are added.

    *Guarantee*: the decoded sum of m <= terms encoded numbers differs from the sum of the numbers by at most
    m step / 2, up to the rounding of float64 (2^-53 of a number). Each integer is at most bound / step + 1/2 in
    magnitude, and ``terms`` of them stay below 2^(bits - 1).

    Attributes:
        bits: 32 or 64.
    """

    bits: int
    bound: float
    terms: int

    @cached_property
    def shift(self) -> int:
        """The exponent s of the smallest step 2^-s that excludes an overflow."""
        most = (Fraction(2 ** (self.bits - 1) - 1, self.terms) - Fraction(1, 2)) / Fraction(self.bound)
        shift = most.numerator.bit_length() - most.denominator.bit_length()  # floor(log2 most), or one more
        return shift if Fraction(2) ** shift <= most else shift - 1

    @property
    def step(self) -> float:
        """Distance of two neighbouring numbers, a power of two."""
        return 2.0**-self.shift

    @property
    def dtype(self) -> type[np.unsignedinteger[Any]]:
        """The dtype of the integers."""
        return np.uint32 if self.bits == 32 else np.uint64

    def encode(self, x: NDArray[np.floating[Any]], factor: float = 1.0) -> Words:
        """The integers (P,) of ``factor`` times x (P,), each rounded to the nearest step.

        Raises:
            ValueError: an entry is NaN or above ``bound`` in magnitude.
        """
        signed = np.empty(len(x), np.int32 if self.bits == 32 else np.int64)
        for start in range(0, len(x), _BLOCK):
            block = x[start : start + _BLOCK].astype(np.float64)
            block *= factor
            low, high = float(block.min()), float(block.max())
            if not -self.bound <= low <= high <= self.bound:  # NaN fails too
                raise ValueError(f"an entry times its weight is {max(high, -low):.3g}, above {self.bound:g}")
            block *= 2.0**self.shift
            signed[start : start + _BLOCK] = np.rint(block, out=block)
        return signed.view(self.dtype)

    def decode(self, total: Words) -> NDArray[np.float64]:
        """A sum of encoded numbers, (P,)."""
        signed = total.view(np.int32 if self.bits == 32 else np.int64)
        return signed.astype(np.float64) * self.step
