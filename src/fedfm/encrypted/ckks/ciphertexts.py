"""Arrays of CKKS ciphertexts as residues. Their arithmetic tracks levels and scales.

This module computes sums, products with constants and matrices, and tensor products of ciphertexts, directly on the
residues. Operations that need keys or a division by a prime are methods of :class:`KeyOperations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks.ring import Residues, Ring
from fedfm.errors import InputError

SCALE_TOLERANCE = 2.0**-10  # largest relative error of a sum whose operands have slightly different scales
_EXACT_FACTOR = 16  # a product with an integer up to this number costs no level
LEAST_BITS = 16  # a narrow prime rescales a product only if the encoded factor has at least this number of bits

Refresh = Callable[["Ciphertexts"], "Ciphertexts"]


class KeyOperations(Protocol):
    """Operations that need public keys.

    Attributes:
        floor: number of primes that a ciphertext must keep, so that it can still be refreshed.
        refresh: returns fresh ciphertexts of the same pairs of values, at half the scale; None if there is no
            client for this.
    """

    ring: Ring
    floor: int
    refresh: Refresh | None

    def relinearise_and_rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Reduce three polynomials to two, then rescale."""

    def rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Divide by the last prime, and drop this prime."""

    def rotations(self, x: Ciphertexts, steps: Sequence[int]) -> Ciphertexts:
        """Rotate the slots by each of the steps: the value of slot i + step moves to slot i."""

    def conjugate(self, x: Ciphertexts) -> Ciphertexts:
        """Conjugate the slots."""

    def zeros(self, count: int, limbs: int, plus: Residues | None = None) -> Residues:
        """Return fresh encryptions of zero, or of coefficients ``plus`` (count, limbs, N): (count, 2, limbs, N)."""


class Ciphertexts:
    """``count`` ciphertexts with the same level and the same scale.

    The operators +, - and * combine an array with a number, with a single ciphertext, or with an array of the same
    length. A product of two ciphertexts is relinearised and rescaled. The operand with more levels drops the surplus.
    An operand with too few levels for a product is first refreshed in place, if the evaluator has a client.

    *Guarantee*: scales are tracked exactly. The scales of two summands may differ by a factor of up to 1 + 2^-10, which
    bounds the relative error of the second operand.

    Attributes:
        limbs: residues in evaluation form, (count, polynomials, primes, N), uint64.
        scale: factor by which a polynomial is multiplied before it is rounded and encrypted.
        evaluator: has the keys for operations on these ciphertexts.

    Raises:
        InputError: shapes, scales or evaluators do not match, or no level is left.
    """

    __slots__ = ("evaluator", "limbs", "scale")

    def __init__(self, limbs: NDArray[np.uint64], scale: float, evaluator: KeyOperations) -> None:
        ring = evaluator.ring
        if limbs.dtype != np.uint64 or limbs.ndim != 4 or limbs.shape[1] not in (2, 3):
            raise InputError(
                f"limbs have dtype and shape {limbs.dtype} {limbs.shape}; expected uint64 (count, 2 or 3, primes, N)"
            )
        if not (1 <= limbs.shape[2] <= ring.parameters.limbs and limbs.shape[3] == ring.degree):
            raise InputError(
                f"limbs have shape {limbs.shape}; expected 1 to {ring.parameters.limbs} primes, {ring.degree}"
            )
        if not (math.isfinite(scale) and scale >= 1):
            raise InputError(f"scale {scale}: expected a finite number of at least 1")
        self.limbs, self.scale, self.evaluator = limbs, float(scale), evaluator

    # --- properties ------------------------------------------------------------------------------------------------

    @property
    def level(self) -> int:
        """Number of remaining rescalings: the number of primes minus one."""
        return int(self.limbs.shape[2]) - 1

    @property
    def residues(self) -> Residues:
        """The limbs as int64; the two arrays share their memory."""
        return self.limbs.view(np.int64)

    def __len__(self) -> int:
        return int(self.limbs.shape[0])

    def __getitem__(self, which: slice | Sequence[int]) -> Ciphertexts:
        """Select some of the ciphertexts."""
        return self._like(self.residues[which])

    def __repr__(self) -> str:
        return f"Ciphertexts({len(self)}, level {self.level}, scale 2^{math.log2(self.scale):.2f})"

    def transparent(self) -> bool:
        """Whether a ciphertext is readable without a key, because all its polynomials except the first are zero."""
        return not bool(self.limbs[:, 1:].any(axis=(1, 2, 3)).all())

    # --- arithmetic ------------------------------------------------------------------------------------------------

    def __add__(self, other: Ciphertexts | float) -> Ciphertexts:
        return self._sum(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Ciphertexts | float) -> Ciphertexts:
        return self._sum(other, -1)

    def __rsub__(self, other: float) -> Ciphertexts:
        return -self + other

    def __neg__(self) -> Ciphertexts:
        return self * -1

    @overload
    def __mul__(self, other: Ciphertexts) -> Ciphertexts: ...
    @overload
    def __mul__(self, other: float) -> Ciphertexts: ...
    def __mul__(self, other: Ciphertexts | float) -> Ciphertexts:
        if not isinstance(other, Ciphertexts):
            number = float(other)
            if number and number.is_integer() and abs(number) <= _EXACT_FACTOR:
                return self._scale_by(np.full(len(self), int(number), object), 1.0)
            return self.times(np.full(len(self), number))
        return relinearise_and_rescale(products(self, other))

    __rmul__ = __mul__

    def square(self) -> Ciphertexts:
        """Return the square of each ciphertext; this costs one level."""
        return self * self

    def plus(self, numbers: NDArray[np.floating[Any]]) -> Ciphertexts:
        """Add one number to each ciphertext; ``numbers`` is (count,)."""
        if numbers.shape != (len(self),):
            raise InputError(f"{numbers.shape} numbers for {len(self)} ciphertexts")
        shift = [self.evaluator.ring.constant(round(float(v) * self.scale), self.level + 1) for v in numbers]
        one = np.ones((), np.int64)
        out = self.residues.copy()
        out[:, 0] = self.evaluator.ring.affine(np.ascontiguousarray(out[:, 0]), one, np.stack(shift))
        return self._like(out)

    def times(self, numbers: NDArray[np.floating[Any]]) -> Ciphertexts:
        """Multiply each ciphertext by one number, which costs one level; ``numbers`` is (count,)."""
        if numbers.shape != (len(self),):
            raise InputError(f"{numbers.shape} numbers for {len(self)} ciphertexts")
        if not (np.isfinite(numbers).all() and numbers.all()):
            raise InputError("the numbers must be finite, and not zero: a product with zero is readable without a key")
        x = self.for_plain(float(np.abs(numbers).min()))
        scale = x.plain_scale()
        factors = np.array([round(float(v) * scale) for v in numbers], object)
        if not factors.all():
            raise InputError(f"a product with {np.abs(numbers).min():g} vanishes at scale 2^{math.log2(scale):.0f}")
        return x.evaluator.rescale(x._scale_by(factors, scale))

    def at(self, limbs: int) -> Ciphertexts:
        """Return ciphertexts of the same values with only the first ``limbs`` primes."""
        if limbs > self.level + 1:
            raise InputError(f"{self.level + 1} primes are left, but {limbs} are needed; refresh the ciphertexts")
        return self if limbs == self.level + 1 else self._like(self.residues[:, :, :limbs])

    def rotate(self, steps: int) -> Ciphertexts:
        """Rotate the slots cyclically: the value of slot i + steps moves to slot i."""
        return self.rotations([steps])

    def rotations(self, steps: Sequence[int]) -> Ciphertexts:
        """Rotate all ciphertexts by each of the steps: (count,) -> (len(steps) * count,), step by step."""
        slots = self.evaluator.ring.degree // 2
        if len(steps) == 1 and not steps[0] % slots:
            return self
        return self.evaluator.rotations(self, steps)

    def total(self) -> Ciphertexts:
        """Return the sum of all ciphertexts as one ciphertext."""
        parts = self.residues
        while len(parts) > 1:
            half = len(parts) // 2
            rest = parts[2 * half :]
            parts = self.evaluator.ring.add(
                np.ascontiguousarray(parts[:half]), np.ascontiguousarray(parts[half : 2 * half])
            )
            parts = np.concatenate([parts, rest]) if len(rest) else parts
        return self._like(parts)

    def refresh(self) -> Ciphertexts:
        """Return fresh ciphertexts of the same values.

        Raises:
            InputError: the evaluator has no client that could refresh them.
        """
        return self.pair().refresh_pairs().unpair(len(self))

    def refresh_pairs(self) -> Ciphertexts:
        """Return fresh ciphertexts of the same pairs, at half the scale, as :meth:`unpair` needs it.

        Raises:
            InputError: the evaluator has no client that could refresh them.
        """
        if self.evaluator.refresh is None:
            raise InputError(f"level {self.level} is too low for the next product, and no client can refresh values")
        return self.evaluator.refresh(self._usual().at(self.evaluator.floor))

    def pair(self, sign: int = 1) -> Ciphertexts:
        """Combine real slots in pairs a + ``sign`` u b, the first half with the second: (count,) -> (ceil(count / 2),).

        u is the polynomial X^(N/2), which is i in every second slot and -i in the others, so rotations by an even
        number of slots, sums, and products with real slots keep the pairs.
        """
        return self._like(self.evaluator.ring.pair(self.residues, sign))

    def unpair(self, count: int) -> Ciphertexts:
        """Separate pairs by one conjugation each, at twice the scale: (ceil(count / 2),) -> (count,)."""
        turned = self.evaluator.conjugate(self).residues
        return self._like(self.evaluator.ring.unpair(self.residues, turned, count), 2 * self.scale)

    def for_plain(self, smallest: float = 1.0) -> Ciphertexts:
        """Drop to the highest level that allows a product with a plaintext; refresh if there is none.

        Rescaling after such a product may use a narrow prime, if this prime has enough bits.
        """
        parameters, least = self.evaluator.ring.parameters, max(self.evaluator.floor, 1)
        for attempt in range(2):
            able = range(self.level + 1, least, -1)
            narrow = [n for n in able if not parameters.wide(n)]
            fits = (
                narrow and smallest * parameters.scale * parameters.primes[narrow[0] - 1] >= self.scale * 2**LEAST_BITS
            )
            if fits:
                return self.at(narrow[0])
            if wide := self._able():
                return self.at(wide[0])
            if attempt == 0 and self.evaluator.refresh is not None:
                self._become(self.refresh())
            elif able:
                return self.at(able[0])
        raise InputError("the parameters have no level for a product with numbers")

    def plain_scale(self) -> float:
        """Return the scale that a plaintext needs, so that the rescaled product has the parameters' scale."""
        parameters = self.evaluator.ring.parameters
        return parameters.scale * parameters.primes[self.level] / self.scale

    def renew_with(self, *others: Ciphertexts, lift: int = 1) -> None:
        """Refresh this array and others in place, in one message, if one of them has no level left for a product.

        Arrays that have all levels are not sent. The client does not change the integer coefficients of a polynomial,
        so each array keeps its own scale. This array, whose values have to be small, is sent ``lift`` times as large:
        it returns at a scale that is larger by this factor, with that much less noise. If several products follow
        before the next refresh, their scales would grow too far, so then it is not.
        """
        parts = list({id(part): part for part in (self, *others)}.values())
        spent = [part for part in parts if part.level + 1 < part.evaluator.ring.parameters.limbs]
        if not spent or all(part._able() for part in parts):
            return
        lift = lift if self.evaluator.ring.parameters.limbs - self.evaluator.floor <= 2 else 1
        lifts = [lift if part is self else 1 for part in spent]
        sent = [part if by == 1 else part * by for part, by in zip(spent, lifts, strict=True)]
        usual = [part._usual().at(self.evaluator.floor) for part in sent]
        together = np.concatenate([part.limbs for part in usual])
        fresh = Ciphertexts(together, max(part.scale for part in usual), self.evaluator).refresh()
        start = 0
        for part, prepared, by in zip(spent, usual, lifts, strict=True):
            part.limbs, part.scale = np.ascontiguousarray(fresh.limbs[start : start + len(part)]), by * prepared.scale
            start += len(part)

    def over(self, number: float) -> Ciphertexts:
        """Divide by a positive number by changing the scale, which costs no level.

        The scale is then larger by this factor. The next product with a plaintext restores the usual scale, because its
        plaintext scale is smaller by the same factor.
        """
        return self._like(self.residues, self.scale * number)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _like(self, residues: Residues, scale: float | None = None) -> Ciphertexts:
        limbs = np.ascontiguousarray(residues).view(np.uint64)
        return Ciphertexts(limbs, self.scale if scale is None else scale, self.evaluator)

    def _sum(self, other: Ciphertexts | float, sign: int) -> Ciphertexts:
        if not isinstance(other, Ciphertexts):
            return self.plus(np.full(len(self), sign * float(other)))
        a, b = align_levels(self, other)
        if abs(a.scale / b.scale - 1) > SCALE_TOLERANCE:
            raise InputError(f"scales 2^{math.log2(a.scale):.4f} and 2^{math.log2(b.scale):.4f} in one sum")
        if a.limbs.shape[1] != b.limbs.shape[1]:
            raise InputError("a sum of a relinearised product and one that is not relinearised")
        x, y = (np.ascontiguousarray(np.broadcast_to(c.residues, _larger(a, b))) for c in (a, b))
        return a._like(self.evaluator.ring.add(x, y, sign))

    def _scale_by(self, factors: NDArray[np.object_], scale: float) -> Ciphertexts:
        """Multiply by integers (count,), which encode numbers at the scale ``scale``."""
        ring = self.evaluator.ring
        rows = np.stack([ring.constant(int(f), self.level + 1) for f in factors])
        rows = np.repeat(rows, self.limbs.shape[1], axis=0)
        return self._like(ring.affine(self.residues, rows, np.zeros((), np.int64)), self.scale * scale)

    def _usual(self) -> Ciphertexts:
        """Rescale to the parameters' scale, if a narrow prime is left; a mask hides only values up to its bound."""
        parameters, limbs = self.evaluator.ring.parameters, self.level + 1
        if abs(self.scale / parameters.scale - 1) <= SCALE_TOLERANCE or limbs <= self.evaluator.floor:
            return self
        if parameters.wide(limbs):
            return self.at(limbs - 1)._usual()
        scale = self.plain_scale()
        return self.evaluator.rescale(self._scale_by(np.full(len(self), round(scale), object), round(scale)))

    def _for_product(self) -> int:
        """Return the largest number of primes that allows a product of ciphertexts; refresh if there is none."""
        if not self._able():
            self._become(self.refresh())
        if not (able := self._able()):
            raise InputError("the parameters have no level for a product of ciphertexts")
        return able[0]

    def _able(self) -> list[int]:
        """Return the numbers of primes that allow a product of ciphertexts, in descending order."""
        parameters, least = self.evaluator.ring.parameters, max(self.evaluator.floor, 1)
        return [n for n in range(self.level + 1, least, -1) if parameters.wide(n)]

    def _become(self, fresh: Ciphertexts) -> None:
        """Replace the content by fresh ciphertexts of the same values, so that later uses need no other refresh."""
        self.limbs, self.scale = fresh.limbs, fresh.scale


def align_levels(a: Ciphertexts, b: Ciphertexts) -> tuple[Ciphertexts, Ciphertexts]:
    """Return both operands with the primes that they have in common."""
    _check_counts(a, b)
    limbs = min(a.level, b.level) + 1
    return a.at(limbs), b.at(limbs)


def products(a: Ciphertexts, b: Ciphertexts) -> Ciphertexts:
    """Return elementwise products; each has three polynomials, which :func:`relinearise_and_rescale` reduces to two."""
    _check_counts(a, b)
    x, y = factors(a, b)
    count, _, limbs, degree = _larger(x, y)
    out = np.empty((count, 3, limbs, degree), np.int64)
    one_x, one_y = len(x) == 1, len(y) == 1
    for i in range(count):
        p, q = 0 if one_x else i, 0 if one_y else i
        x.evaluator.ring.tensor(x.residues[p : p + 1], y.residues[q : q + 1], out[i])
    return x._like(out, x.scale * y.scale)


def relinearise_and_rescale(product: Ciphertexts) -> Ciphertexts:
    """Relinearise a product, then rescale it."""
    return product.evaluator.relinearise_and_rescale(product)


def concatenate(parts: Sequence[Ciphertexts]) -> Ciphertexts:
    """Concatenate several arrays; the result has the scale of the first array."""
    limbs = min(part.level for part in parts) + 1
    if any(abs(part.scale / parts[0].scale - 1) > SCALE_TOLERANCE for part in parts):
        raise InputError("arrays with different scales")
    return parts[0]._like(np.concatenate([part.at(limbs).residues for part in parts]))


def factors(a: Ciphertexts, b: Ciphertexts) -> tuple[Ciphertexts, Ciphertexts]:
    """Return both factors with the most primes that allow their product; refresh them if there are too few."""
    limbs = min(a._for_product(), b._for_product())
    if not a.evaluator.ring.parameters.wide(limbs):  # pragma: no cover - both operands have wide primes
        raise InputError("the factors have no common level")
    if a.evaluator is not b.evaluator:
        raise InputError("ciphertexts of two evaluators")
    x, y = a.at(limbs), b.at(limbs)
    if x.limbs.shape[1] != 2 or y.limbs.shape[1] != 2:
        raise InputError("factors must be relinearised")
    return x, y


def _check_counts(a: Ciphertexts, b: Ciphertexts) -> None:
    if a.evaluator is not b.evaluator:
        raise InputError("ciphertexts of two evaluators")
    if len(a) != len(b) and 1 not in (len(a), len(b)):
        raise InputError(f"{len(a)} and {len(b)} ciphertexts: expected equally many, or one")


def _larger(a: Ciphertexts, b: Ciphertexts) -> tuple[int, ...]:
    return (max(len(a), len(b)), *a.limbs.shape[1:])
