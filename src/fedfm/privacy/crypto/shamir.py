"""Secret sharing over the prime field of 2^256 - 189.

Shamir. How to Share a Secret. Communications of the ACM 1979. Any ``threshold`` shares determine the secret; fewer
disclose nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedfm.privacy.crypto import keys

PRIME = 2**256 - 189  # the largest prime below 2^256: secrets and shares have 32 bytes


def split(secret: int, threshold: int, count: int) -> list[int]:
    """The shares f(1), ..., f(count) of a random polynomial f of degree threshold - 1 with f(0) = secret.

    Raises:
        ValueError: the secret is not in the field, or not 1 <= threshold <= count.
    """
    if not (0 <= secret < PRIME and 1 <= threshold <= count):
        raise ValueError(f"threshold {threshold} of {count} shares, or a secret outside the field")
    # The random number has 128 bits more than the prime, so the remainder is uniform up to 2^-128.
    f = [secret, *(int.from_bytes(keys.entropy(48), "little") % PRIME for _ in range(threshold - 1))]
    return [_horner(f, x) for x in range(1, count + 1)]


def _horner(f: list[int], x: int) -> int:
    y = 0
    for coefficient in reversed(f):
        y = (y * x + coefficient) % PRIME
    return y


def combine(shares: Mapping[int, int], threshold: int) -> int:
    """The secret f(0) from the shares, which map x to f(x).

    Raises:
        ValueError: there are fewer shares than ``threshold``, or they do not lie on one polynomial.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares arrived, {threshold} are needed")
    points = list(shares.items())
    base = points[:threshold]
    if any(_interpolate(base, x) != y for x, y in points[threshold:]):
        raise ValueError("a share is wrong")
    return _interpolate(base, 0)


def _interpolate(points: list[tuple[int, int]], at: int) -> int:
    """The value of Lagrange's polynomial through ``points`` at the abscissa ``at``."""
    total = 0
    for x, y in points:
        above, below = y, 1
        for other, _ in points:
            if other != x:
                above, below = above * (at - other) % PRIME, below * (x - other) % PRIME
        total += above * pow(below, -1, PRIME)
    return total % PRIME
