"""Rings of CKKS: parameters and their security, primes, number-theoretic transforms, exact changes of the modulus.

A polynomial modulo X^N + 1 is an array (primes, N) of residues. It is in *evaluation form* (transformed, bit-reversed),
unless a function's docstring names *coefficients*.

Cheon, Kim, Kim, Song. Homomorphic encryption for arithmetic of approximate numbers. ASIACRYPT 2017.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import modular_kernels, transform_kernels
from fedfm.errors import InputError

Residues = NDArray[np.int64]

# Largest total bits of all primes at 128-bit security with a ternary secret. Albrecht et al. Homomorphic Encryption
# Standard. HomomorphicEncryption.org, 2018, Table 1.
SECURE_BITS = {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881}
WORD = 30  # bits of a word; long integers are stored as several words


@dataclass(frozen=True)
class Parameters:
    """Parameters on which client and server must agree.

    Attributes:
        degree: N; a ciphertext has N / 2 slots.
        bits: size of each prime, in order; rescaling drops the last prime.
        special: size in bits of the prime for key switching; no other prime is larger.
        scale_bits: log2 of the scale of fresh ciphertexts. A prime with at least this number of bits is *wide*. The
            other primes are for products with plaintexts.

    Raises:
        InputError: security is below 128 bits, or such primes do not exist or are too large.
    """

    degree: int = 8192
    bits: tuple[int, ...] = (43, 36, 36, 24, 36)
    special: int = 43
    scale_bits: int = 36

    def __post_init__(self) -> None:
        most = SECURE_BITS.get(self.degree)
        if most is None:
            raise InputError(f"degree {self.degree}: expected one of {sorted(SECURE_BITS)}")
        total = sum(self.bits) + self.special
        if total > most:
            raise InputError(
                f"primes of {total} bits at degree {self.degree} give less than 128-bit security; at most {most} bits "
                f"are allowed"
            )
        if len(self.bits) < 2 or not all(20 <= b <= 46 for b in (*self.bits, self.special)):
            raise InputError(f"primes of {self.bits} and {self.special} bits: expected at least two, of 20 to 46 bits")
        if self.special < max(self.bits) or not 16 <= self.scale_bits <= max(self.bits):
            raise InputError(f"special prime of {self.special} bits, scale 2^{self.scale_bits}: too small or too large")

    @cached_property
    def primes(self) -> tuple[int, ...]:
        """All primes, the special prime last; primes of one size are the largest below 2^bits, in ascending order."""
        sizes = (*self.bits, self.special)
        found = {b: iter(sorted(_primes(b, sizes.count(b), 2 * self.degree))) for b in set(sizes)}
        return tuple(next(found[b]) for b in sizes)

    @property
    def slots(self) -> int:
        """Number of slots in a ciphertext."""
        return self.degree // 2

    @property
    def scale(self) -> float:
        """Scale of fresh ciphertexts."""
        return 2.0**self.scale_bits

    @property
    def limbs(self) -> int:
        """Number of primes of a fresh ciphertext."""
        return len(self.bits)

    def wide(self, limbs: int) -> bool:
        """Whether the last of the first ``limbs`` primes can rescale a product of two ciphertexts."""
        return self.bits[limbs - 1] >= self.scale_bits

    def modulus(self, limbs: int) -> int:
        """Return the product of the first ``limbs`` primes."""
        return math.prod(self.primes[:limbs])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of degree, primes and scale."""
        return hashlib.sha256(repr((self.degree, self.primes, self.scale_bits)).encode()).digest()


SLOW_LINK = Parameters(16384, (44, 37, 24, 37, 37, 37, 37, 37, 37, 24, 37), 44, 37)  # 432 of 438 bits


def _primes(bits: int, count: int, step: int) -> list[int]:
    """Return the largest primes below 2^bits that are 1 modulo ``step``."""
    found: list[int] = []
    q = (1 << bits) - step + 1
    while len(found) < count:
        if q < 1 << (bits - 1):
            raise InputError(f"there are not {count} primes of {bits} bits that are 1 modulo {step}")
        if _is_prime(q):
            found.append(q)
        q -= step
    return found


def _is_prime(n: int) -> bool:
    """Run the Miller-Rabin test; these bases make it exact for numbers below 3.3e24 (Sorenson, Webster 2015)."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41):
        if n % base == 0:
            return n == base
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


class Ring:
    """Arithmetic on residues modulo the primes of one set of parameters. All arrays are int64, (..., primes, N)."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters, self.degree = parameters, parameters.degree
        self.primes = np.array(parameters.primes, np.int64)
        tables = [_table(int(q), self.degree) for q in self.primes]
        self.roots = self._arrange(np.stack([forth for forth, _ in tables]))
        self.inverse_roots = self._arrange(np.stack([back for _, back in tables]))
        self.shrink = np.array([pow(self.degree, -1, int(q)) for q in self.primes], np.int64)

    def _arrange(self, roots: Residues) -> tuple[Any, ...]:
        """Return the tables of a transform: roots and those of the last three steps, each also divided by its prime."""
        ratios = roots / self.primes[:, None].astype(np.float64)
        return roots, ratios, transform_kernels.last_roots(roots), transform_kernels.last_roots(ratios)

    def forward(self, x: Residues, first: int = 0) -> Residues:
        """Transform coefficients to evaluation form, in place. The first prime of x has the index ``first``."""
        rows, at = self._rows(x), slice(first, first + x.shape[-2])
        transform_kernels.forward(rows, *(table[at] for table in self.roots), self.primes[at])
        return x

    def backward(self, x: Residues, first: int = 0) -> Residues:
        """Invert :meth:`forward`, in place."""
        rows, at = self._rows(x), slice(first, first + x.shape[-2])
        tables = (table[at] for table in self.inverse_roots)
        transform_kernels.backward(rows, *tables, self.shrink[at], self.primes[at])
        return x

    def add(self, a: Residues, b: Residues, sign: int = 1) -> Residues:
        """Return a + b, or a - b if ``sign`` is -1."""
        out = np.empty(a.shape, np.int64)
        modular_kernels.add(self._rows(a), self._rows(b), sign, self._rows(out), self.primes)
        return out

    def subtract_from(self, a: Residues, b: Residues) -> None:
        """Subtract b (rows, primes, N) from the first polynomials of a (rows, 2, primes, N), in place."""
        modular_kernels.subtract_from(a, b, self.primes)

    def pair(self, x: Residues, sign: int = 1) -> Residues:
        """Combine polynomials in pairs a + ``sign`` X^(N/2) b, of the first half and the second.

        (n, ...) -> (ceil(n / 2), ...); if n is odd, the last polynomial of the first half stays alone.
        """
        half = (len(x) + 1) // 2
        out = x[:half].copy()
        first, second = self._rows(out[: len(x) - half]), self._rows(x[half:])
        modular_kernels.add_turned(first, second, self._units, sign, self.primes)
        return out

    def unpair(self, x: Residues, conjugates: Residues, count: int) -> Residues:
        """Separate pairs a + X^(N/2) b, given their conjugates a - X^(N/2) b: return 2 a and 2 b, ``count`` in all."""
        out = np.empty((count, *x.shape[1:]), np.int64)
        modular_kernels.unpair(*(self._rows(a) for a in (x, conjugates)), self._units, self._rows(out), self.primes)
        return out

    @property
    def _units(self) -> Residues:
        """X^(N/2) at the first root, which is i, modulo each prime."""
        units: Residues = self.roots[0][:, 1]
        return units

    def affine(self, a: Residues, factor: Residues, shift: Residues) -> Residues:
        """Multiply by ``factor`` and add ``shift``, each (primes,) or (rows, primes).

        All axes of a before the last two count as rows.
        """
        rows = self._rows(a)
        out = np.empty(rows.shape, np.int64)
        wide = (rows.shape[0], rows.shape[1])
        modular_kernels.affine(
            rows, np.array(np.broadcast_to(factor, wide)), np.array(np.broadcast_to(shift, wide)), out, self.primes
        )
        return out.reshape(a.shape)

    def dyadic(self, a: Residues, b: Residues, plus: Residues) -> Residues:
        """Return the elementwise product of a and b, plus ``plus``."""
        out = np.empty(a.shape, np.int64)
        modular_kernels.dyadic(*(self._rows(x) for x in (a, b, plus, out)), self.primes)
        return out

    def tensor(self, a: Residues, b: Residues, out: Residues) -> None:
        """Sum products of ciphertexts: a, b (terms, 2, primes, N) -> out (3, primes, N), for at most 2^10 terms."""
        modular_kernels.tensor(a, b, out, self.primes)

    def outer(self, a: Residues, b: Residues, steps: tuple[int, ...], out: Residues) -> None:
        """Sum products of ciphertexts for all pairs; ``steps`` is explained in :func:`modular_kernels._outer`."""
        modular_kernels.outer(a, b, steps, out, self.primes)

    def weave(self, a: Residues, b: Residues, out: Residues) -> None:
        """Sum ciphertexts times plaintexts: a (terms, 2, primes, N), b (terms, primes, N) -> out (2, primes, N)."""
        modular_kernels.weave(a, b, out, self.primes)

    def constant(self, value: int, limbs: int) -> Residues:
        """Return an integer modulo each of the first ``limbs`` primes, (limbs,)."""
        return np.array([value % int(q) for q in self.primes[:limbs]], np.int64)

    def whole(self, words: Residues, minus: int, limbs: int) -> Residues:
        """Return residues (rows, limbs, N) of the integers in ``words``, minus ``minus``.

        Each integer is given as words of 30 bits: (rows, words, N).
        """
        out = np.empty((len(words), limbs, self.degree), np.int64)
        modular_kernels.residues(words, WORD, self.constant(minus, limbs), out, self.primes)
        return out

    def halves(self, x: Residues, limbs: int) -> Residues:
        """Return half of centred integers, rounded down: coefficients (rows, l, N) -> (rows, limbs, N).

        Each integer lies in [-q/2, q/2), where q is the product of the first l primes.
        """
        have = x.shape[-2]
        before, half, digits = self.mixed_radix(x)
        products = np.array([[b % int(p) for b in before] for p in self.primes[have:limbs]], np.int64)
        out = np.empty((len(x), limbs, self.degree), np.int64)
        out[:, :have], more = x, np.empty((len(x), limbs - have, self.degree), np.int64)
        modular_kernels.from_digits(digits, self.constant(half, limbs)[have:], products, more, self.primes[have:])
        out[:, have:] = more
        modular_kernels.halve(out, (digits.sum(1) + half % 2) % 2, self.primes)  # all primes are odd
        return out

    def mixed_radix(self, x: Residues) -> tuple[list[int], int, Residues]:
        """Write centred integers plus h = floor(q / 2) as sums of weighted digits: coefficients (rows, l, N).

        Returns:
            The weights (1, q_1, q_1 q_2, ...), h (q is the product of the l primes), and the digits (rows, l, N).
        """
        have = x.shape[-2]
        half = self.parameters.modulus(have) // 2
        before = [math.prod(self.parameters.primes[:k]) for k in range(have)]
        products = np.array([[b % int(p) for b in before] for p in self.primes[:have]], np.int64)
        inverses = np.array([pow(b, -1, int(p)) for b, p in zip(before, self.primes[:have], strict=True)], np.int64)
        digits = x.copy()
        modular_kernels.digits(digits, self.constant(half, have), products, inverses, self.primes)
        return before, half, digits

    @staticmethod
    def _rows(x: Residues) -> Any:
        """View x as (rows, primes, N)."""
        if not x.flags.c_contiguous:
            raise ValueError("residues must be contiguous in memory")
        return x.reshape(-1, *x.shape[-2:])


def _table(q: int, degree: int) -> tuple[Residues, Residues]:
    """Return powers of the least primitive 2N-th root of unity and of its inverse, (N,) each, in bit-reversed order."""
    order = 2 * degree
    some = next(w for g in range(2, q) if pow(w := pow(g, (q - 1) // order, q), degree, q) == q - 1)
    square = some * some % q
    powers, value = [], some
    for _ in range(degree):  # all odd powers are primitive roots
        powers.append(value)
        value = value * square % q
    root = min(powers)
    ladder = [1] * order
    for i in range(1, order):
        ladder[i] = ladder[i - 1] * root % q
    bits = degree.bit_length() - 1
    reverse = sum(((np.arange(degree) >> i) & 1) << (bits - 1 - i) for i in range(bits))
    table = np.array(ladder, np.int64)
    return table[reverse], table[(order - reverse) % order]
