"""Reorder encrypted samples, in the same way for the slots of every token.

Slot t B + s has token t of sample s (:class:`~fedfm.encrypted.ckks.transformer_block.Packing`). Position j gets the
sample order[j], so its new value comes from the slot that is order[j] - j slots further on. The result is a sum over
the shifts k:

    mask_k * (x rotated by k),   mask_k = 1 in the slots of positions j with order[j] - j = k, else 0.

Shifts are written as k = g b + i, with baby steps i and giant steps g (Halevi, Shoup. Algorithms in HElib. CRYPTO
2014). Baby steps are computed one after another, giant steps by Horner's rule, so three rotation keys suffice for all
orders. The operations depend on the number of samples, not on their order. Slots beyond the samples become zero.

Two features share a ciphertext: one is in the real parts of the slots, and sqrt(2) times the other in the imaginary
parts. The polynomial X^(N/4) + X^(3N/4) is i sqrt(2) in every slot, so a product with it costs no level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import encoding
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, KeyOperations, concatenate
from fedfm.encrypted.ckks.ring import Residues, Ring
from fedfm.encrypted.ckks.slot_constants import encode_slots, weighted_sum
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.errors import InputError

Order = NDArray[np.integer[Any]]
Weigh = Callable[[Ciphertexts, int], Ciphertexts]  # (x rotated by each baby step, giant step) -> masked sum of these x
TOGETHER = math.sqrt(3)  # |a + i sqrt(2) b| is at most this times the larger of |a| and |b|


def baby(layout: Packing) -> int:
    """Return the number of baby steps, a power of two near the square root of the number of samples."""
    return 1 << (layout.samples.bit_length() // 2)


def rotations(layout: Packing) -> set[int]:
    """Return the rotation steps for which the client has to send keys."""
    slots, b = layout.parameters.slots, baby(layout)
    return {1 % slots, b % slots, -b % slots} - {0}


def giants(samples: int, layout: Packing) -> range:
    """Return the giant steps for the shifts -(samples - 1) .. samples - 1."""
    b = baby(layout)
    return range((1 - samples) // b, (samples - 1) // b + 1)


def pair_features(x: Ciphertexts) -> Ciphertexts:
    """Combine features in pairs a + i sqrt(2) b: (count,) -> (ceil(count / 2),)."""
    ring, limbs = x.evaluator.ring, x.level + 1
    units = np.zeros((2, ring.degree), np.int64)
    units[0, 0] = units[1, ring.degree // 4] = units[1, 3 * ring.degree // 4] = 1
    plains = encoding.to_residues(units, limbs, ring)
    two = (x[start : start + 2] for start in range(0, len(x), 2))
    return concatenate([weighted_sum(pair, plains[: len(pair)], 1.0) for pair in two])


def unpair_features(slots: NDArray[np.complex128], count: int) -> NDArray[np.float64]:
    """Invert :func:`pair_features` for decrypted slots: (ceil(count / 2), N / 2) -> (count, N / 2)."""
    parts = np.stack([slots.real, slots.imag / math.sqrt(2)], axis=1)
    return np.ascontiguousarray(parts.reshape(-1, slots.shape[1])[:count])


def masks(order: Order, layout: Packing, limbs: int, scale: float, ring: Ring) -> dict[int, Residues]:
    """Return an order's plaintext masks by giant step, each (baby steps, limbs, N).

    Raises:
        InputError: ``order`` is not a permutation, or has more samples than a ciphertext.
    """
    places, b = np.asarray(order), baby(layout)
    if places.ndim != 1 or len(places) > layout.samples or not np.array_equal(np.sort(places), np.arange(len(places))):
        raise InputError(f"expected an order that names every sample once, of at most {layout.samples} samples")
    shifts, out = places - np.arange(len(places)), {}
    for g in giants(len(places), layout):
        run = np.zeros((b, layout.samples))
        here = np.flatnonzero(shifts // b == g)
        run[shifts[here] % b, here] = 1
        # The giant step rotates after the product with the mask, so rotate the mask back.
        out[g] = encode_slots(np.tile(np.roll(run, g * b, axis=1), layout.places), limbs, scale, ring)
    return out


def weighing(plains: dict[int, Residues], scale: float, keys: KeyOperations) -> Weigh:
    """Return the ``weigh`` function for :func:`permute_samples`, from the plaintexts of :func:`masks`.

    The function adds an encryption of zero to each sum. If no shift of a giant step occurs in the order, all masks of
    this step are zero. Without the addition anyone could read the sum, and SEAL refuses such ciphertexts.
    """
    zero = keys.zeros(1, next(iter(plains.values())).shape[1])

    def weigh(turned: Ciphertexts, g: int) -> Ciphertexts:
        found = weighted_sum(turned, plains[g], scale)
        return Ciphertexts(keys.ring.add(found.residues, zero).view(np.uint64), found.scale, keys)

    return weigh


def permute_samples(x: Ciphertexts, samples: int, layout: Packing, weigh: Weigh) -> Ciphertexts:
    """Reorder the samples of all ciphertexts; the result is not rescaled."""
    b = baby(layout)

    def rotate(one: Ciphertexts, step: int) -> Ciphertexts:
        return one.evaluator.rotations(one, [step])

    below, above = [g for g in giants(samples, layout) if g < 0], [g for g in giants(samples, layout) if g >= 0]
    done = []
    for i in range(len(x)):
        steps = [x[i : i + 1]]
        while len(steps) < b:
            steps.append(rotate(steps[-1], 1))
        turned = concatenate(steps)
        total = weigh(turned, above[-1])
        for g in reversed(above[:-1]):
            total = rotate(total, b) + weigh(turned, g)
        if below:
            other = weigh(turned, below[0])
            for g in below[1:]:
                other = rotate(other, -b) + weigh(turned, g)
            total = total + rotate(other, -b)
        done.append(total)
    return concatenate(done)
