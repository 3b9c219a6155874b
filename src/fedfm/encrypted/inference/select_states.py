"""Select the disclosed values of encrypted states: products with plaintexts, then rotations that join values."""

from __future__ import annotations

import math

import numpy as np

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, concatenate
from fedfm.encrypted.ckks.matrices import matrix_product
from fedfm.encrypted.ckks.slot_constants import encode_slots, weighted_sum
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.inference.messages import RELEASE_LIMBS
from fedfm.encrypted.inference.released_states import Released


def select_released(x: Ciphertexts, kind: Released, layout: Packing, over: float, largest: float) -> Ciphertexts:
    """Select the disclosed values of a block's states (d,), and divide them by ``over``, the block's scale.

    In the result, all other slots are zero, and one prime is left. ``largest`` bounds the disclosed values.
    """
    ring, factor = x.evaluator.ring, plain_factor(x, largest)
    if kind.projection is not None:
        picked = matrix_product(np.rint(kind.projection * (factor / over)), x.residues, ring)
        return x.evaluator.rescale(Ciphertexts(picked.view(np.uint64), x.scale * factor, x.evaluator))
    # Most rows of factors are zero, and the others repeat: 197 x 197 rows of a class token's are one and the same.
    numbers: dict[bytes, int] = {}
    terms = {
        j: {i: numbers.setdefault(row.tobytes(), len(numbers)) for i, row in enumerate(rows) if row.any()}
        for j, rows in kind.weights().items()
    }
    distinct = np.stack([np.frombuffer(row) for row in numbers]) / over
    plains = encode_slots(np.repeat(distinct, layout.samples, axis=1), x.level + 1, factor, ring)
    out = []
    for start in range(0, len(x), kind.together):
        part, sums = x[start : start + kind.together], {}
        for j, term in terms.items():
            # The last ciphertext may lack features. SEAL refuses to rotate a product with zeros.
            if used := [i for i in term if i < len(part)]:
                chosen = part if len(used) == len(part) else part[used]
                sums[j] = weighted_sum(chosen, plains[[term[i] for i in used]], factor)
        out.append(_rotate_and_sum(sums, layout))
    return x.evaluator.rescale(concatenate(out))


def plain_factor(x: Ciphertexts, largest: float) -> float:
    """Return a plaintext scale, so that products with slots up to ``largest`` fit into the remaining prime."""
    parameters = x.evaluator.ring.parameters
    # Every coefficient must be below half the last modulus. Each is at most the scale times the largest slot.
    target = min(parameters.scale, 2.0 ** math.floor(math.log2(parameters.primes[0] / 4 / largest)))
    return target * parameters.primes[RELEASE_LIMBS - 1] / x.scale


def _rotate_and_sum(sums: dict[int, Ciphertexts], layout: Packing) -> Ciphertexts:
    """Rotate each ciphertext in ``sums`` by its key, which is a number of places, and add the results.

    Rotations by a power of two are applied to sums, so that several ciphertexts share one rotation.
    """
    for bit in range(layout.places.bit_length() - 1):
        halves: dict[int, Ciphertexts] = {}
        for j, x in sorted(sums.items()):
            moved = x.rotate(layout.samples << bit) if j & 1 else x
            halves[j >> 1] = halves[j >> 1] + moved if j >> 1 in halves else moved
        sums = halves
    return sums[0]
