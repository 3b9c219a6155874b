"""Refresh: if ciphertexts have no levels left, the client encrypts their values again without learning the values.

The server adds a mask r to the encrypted polynomial v; both have integer coefficients. The client decrypts v + r,
halves the integers, and encrypts them with all primes. The server subtracts half of r. Both halves are rounded down, so
the result is v / 2 up to 1/2, which is less than the noise of the encryption. Slots are never decoded.

Slots of v are pairs a + u b of two real values, where u is i or -i. After the refresh v and its conjugate give 2 a and
2 b, so that half of v gives a and b at the old scale. Taking both parts of complex slots by a conjugation is known from
the bootstrapping of CKKS (Cheon, Han, Kim, Kim, Song. EUROCRYPT 2018).

*Guarantee*: the client decrypts v + r, where r is uniform over M integers. For one ciphertext, the statistical distance
of v + r from r alone is at most sqrt(N) * bound * scale / M; the distances of all ciphertexts add up. Proof: the
distance of one coefficient is at most |v_j| / M, and sum |v_j| <= sqrt(N) |v|_2 <= sqrt(N) max |slot| * scale (Cauchy
and Schwarz; the embedding is an isometry up to sqrt(N)). The rest of the ciphertext discloses nothing more, because the
server adds a fresh encryption of zero under the client's public key. This fresh encryption also hides the traces of the
server's weights.

*Assumes*: real values are at most ``bound`` in magnitude, so that pairs are at most sqrt(2) times this, and ring
learning with errors is hard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.ring import WORD, Parameters, Residues, Ring
from fedfm.encrypted.ckks.seal import ClientKeys
from fedfm.errors import InputError, RunError
from fedfm.privacy.crypto import keys

MOST = 2.0**-40  # largest total statistical distance for the ciphertexts that one client decrypts in a run
# The condition is printed with each distance. No code can check it, since the server cannot read a ciphertext's slots.
HOLDS_WHILE = "as long as every value stays within the intervals of the model's polynomials"
PAIRED = math.sqrt(2)  # largest magnitude of a slot of a pair, over that of the two values
_AT_A_TIME = 8  # number of ciphertexts that are processed at a time, so that their masks stay in the cache


def mask_bits(parameters: Parameters, limbs: int, scale: float, bound: float) -> int:
    """Return the largest number b of bits for which v + r is below half the modulus, with r in [-2^(b-1), 2^(b-1)).

    Raises:
        InputError: not even one bit fits.
    """
    room = parameters.modulus(limbs) // 2 - math.ceil(bound * scale)
    if room < 1:
        raise InputError(f"values up to {bound:g} at scale 2^{math.log2(scale):.0f} leave no room for a mask")
    return room.bit_length()


def distance(parameters: Parameters, limbs: int, scale: float, bound: float) -> float:
    """Return the statistical distance between a masked ciphertext and a mask alone, for slots up to ``bound``."""
    largest = math.sqrt(parameters.degree) * bound * scale
    return min(largest * 2.0 ** -mask_bits(parameters, limbs, scale, bound), 1.0)


def least_limbs(parameters: Parameters, ciphertexts: int, bound: float, most: float = MOST) -> int:
    """Return the number of primes that a ciphertext needs, so that refreshes stay within the distance ``most``.

    Args:
        ciphertexts: number of ciphertexts that will be refreshed.
        bound: largest magnitude of their slots.

    Raises:
        InputError: there are not enough primes.
    """
    for limbs in range(2, parameters.limbs):
        if ciphertexts * distance(parameters, limbs, parameters.scale, bound) <= most:
            return limbs
    raise InputError(
        f"{ciphertexts} refreshed ciphertexts of values up to {bound:g} need a larger modulus than degree "
        f"{parameters.degree} has, for a distance of 2^{math.log2(most):.0f}"
    )


class Spending(Protocol):
    """A ledger of statistical distance."""

    def spend(self, count: int, each: float) -> None:
        """Record ``count`` ciphertexts, each with the distance ``each``, before they are sent."""


@dataclass
class DistanceLedger:
    """The statistical distance that masks have spent for one client in a run.

    Attributes:
        most: the largest allowed distance in the run.
        spent: upper bound of the statistical distance so far.
        ciphertexts: number of ciphertexts that were refreshed so far.
        keep: writes the ledger to disk. It is called after every entry and before the ciphertexts are sent, so that a
            resumed run knows all entries.
    """

    most: float = MOST
    spent: float = 0.0
    ciphertexts: int = 0
    keep: Callable[[DistanceLedger], None] | None = field(default=None, repr=False, compare=False)

    def spend(self, count: int, each: float) -> None:
        """Record ``count`` ciphertexts before they are sent.

        Raises:
            RunError: the run would exceed ``most``. In this case nothing is recorded.
        """
        if self.spent + count * each > self.most:
            raise RunError(
                f"{count} more refreshed ciphertexts would bring the statistical distance to "
                f"2^{math.log2(self.spent + count * each):.1f}, above 2^{math.log2(self.most):.1f}; encrypt fewer rows"
            )
        self.spent += count * each
        self.ciphertexts += count
        if self.keep is not None:
            self.keep(self)

    def __str__(self) -> str:
        shown = f"2^{math.log2(self.spent):.1f}" if self.spent else "0"
        return f"{self.ciphertexts} refreshed ciphertexts, statistical distance at most {shown}, {HOLDS_WHILE}"


@dataclass
class Mask:
    """A secret mask for one array of ciphertexts. It can be removed only once."""

    key: bytes = field(repr=False)
    bits: int
    count: int
    scale: float
    used: bool = False

    def coefficients(self, start: int, stop: int, limbs: int, ring: Ring, halved: bool = False) -> Residues:
        """Return the coefficients of the mask for the ciphertexts from start to stop: (stop - start, limbs, N).

        With ``halved``, return half of each, rounded down.
        """
        words, degree = -(-self.bits // WORD), ring.degree
        size = 4 * words * degree
        counter = (start * size // 16).to_bytes(16, "big")  # N is a multiple of 4, so each mask begins at a block
        stream = Cipher(AES256(self.key), CTR(counter)).encryptor().update(bytes(size * (stop - start)))
        numbers = np.frombuffer(stream, "<u4").reshape(stop - start, words, degree).astype(np.int64)
        numbers &= (1 << WORD) - 1
        numbers[:, -1] &= (1 << (self.bits - WORD * (words - 1))) - 1
        if halved:
            numbers[:, :-1] |= (numbers[:, 1:] & 1) << WORD
            numbers >>= 1
        return ring.whole(numbers, 1 << (self.bits - 1 - halved), limbs)


class Masking:
    """The server's half: masks ciphertexts for one client, and records their distance in the ledger.

    Attributes:
        bound: largest magnitude of any value, from the ranges stored with the model.
    """

    def __init__(self, bound: float, ledger: Spending | None = None) -> None:
        if not 0 < bound < math.inf:
            raise InputError(f"bound {bound}: expected a positive number")
        self.bound = bound
        self.ledger: Spending = DistanceLedger() if ledger is None else ledger

    def hide(self, x: Ciphertexts) -> tuple[Ciphertexts, Mask]:
        """Mask ciphertexts; return the masked ones for the client, and the mask, which stays at the server.

        Raises:
            RunError: the run's statistical distance would exceed its limit.
        """
        ring, limbs = x.evaluator.ring, x.level + 1
        about = (ring.parameters, limbs, x.scale, self.bound * PAIRED)
        self.ledger.spend(len(x), distance(*about))
        mask = Mask(keys.entropy(32), mask_bits(*about), len(x), x.scale)
        out = np.empty_like(x.residues)
        for piece in _pieces(len(x)):
            noise = mask.coefficients(piece.start, piece.stop, limbs, ring)
            out[piece] = ring.add(x.residues[piece], x.evaluator.zeros(len(noise), limbs, noise))
        return Ciphertexts(out.view(np.uint64), x.scale, x.evaluator), mask

    def reveal(self, fresh: Ciphertexts, mask: Mask) -> Ciphertexts:
        """Remove the mask from the client's answer, in place: ciphertexts at half the scale of the masked ones.

        Raises:
            InputError: the number of ciphertexts or the scale is wrong, or the mask was removed before.
        """
        if mask.used or len(fresh) != mask.count or fresh.scale != mask.scale / 2:
            raise InputError(f"{len(fresh)} ciphertexts came for a mask of {mask.count}, or the mask was used before")
        mask.used = True
        ring, out = fresh.evaluator.ring, fresh.residues
        for piece in _pieces(len(fresh)):
            noise = ring.forward(mask.coefficients(piece.start, piece.stop, out.shape[2], ring, halved=True))
            ring.subtract_from(out[piece], noise)
        return fresh


def renew(client: ClientKeys, masked: Residues, second: Residues | None = None) -> Residues:
    """Decrypt masked ciphertexts at the client, and encrypt half of the integers, rounded down, with all primes.

    Args:
        masked: (count, 2, limbs, N).
        second: second polynomials of the new ciphertexts, see :meth:`ClientKeys.encrypt_polynomials`.
    """
    limbs = client.parameters.limbs
    out = np.empty((len(masked), 2, limbs, masked.shape[3]), np.int64)
    for piece in _pieces(len(masked)):
        known = client.ring.backward(client.decrypt_polynomials(masked[piece]))
        out[piece] = client.encrypt_polynomials(
            client.ring.halves(known, limbs), None if second is None else second[piece]
        )
    return out


def _pieces(count: int) -> list[slice]:
    return [slice(start, min(start + _AT_A_TIME, count)) for start in range(0, count, _AT_A_TIME)]
