"""Count the operations of an encrypted block: run the block without keys on ciphertexts with few coefficients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, Refresh
from fedfm.encrypted.ckks.ring import Parameters, Residues, Ring
from fedfm.encrypted.ckks.slot_permutation import permute_samples
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.folded_model import FoldedLayer, block_of
from fedfm.encrypted.inference.released_states import Released
from fedfm.encrypted.inference.select_states import select_released
from fedfm.encrypted.token_places import places_of


class _Short:
    """Parameters with two slots for each place of a token."""

    def __init__(self, parameters: Parameters, places: int) -> None:
        self._parameters, self.degree, self.slots = parameters, 4 * places, 2 * places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameters, name)


class _CountedRing(Ring):
    """A ring without tables, for shapes alone. It counts sums and products, and changes no values.

    Args:
        operations: the counts of :class:`Count`.
    """

    def __init__(self, parameters: Parameters, operations: Counter[tuple[str, int]]) -> None:
        self.parameters, self.degree = parameters, parameters.degree
        self.primes, self._operations = np.array(parameters.primes, np.int64), operations

    def forward(self, x: Residues, first: int = 0) -> Residues:
        self._operations["encode", x.shape[-2]] += len(x)
        return x

    def add(self, a: Residues, b: Residues, sign: int = 1) -> Residues:
        self._operations["add", a.shape[-2]] += math.prod(a.shape[:-2])
        return a

    def pair(self, x: Residues, sign: int = 1) -> Residues:
        half = (len(x) + 1) // 2
        self._operations["affine", x.shape[-2]] += math.prod(x.shape[1:-2]) * (len(x) - half)
        return x[:half]

    def unpair(self, x: Residues, conjugates: Residues, count: int) -> Residues:
        self._operations["add", x.shape[-2]] += math.prod(x.shape[1:-2]) * count
        self._operations["affine", x.shape[-2]] += math.prod(x.shape[1:-2]) * (count - len(x))
        return np.ones((count, *x.shape[1:]), np.int64)

    def affine(self, a: Residues, factor: Residues, shift: Residues) -> Residues:
        self._operations["affine", a.shape[-2]] += math.prod(a.shape[:-2])
        return a

    def tensor(self, a: Residues, b: Residues, out: Residues) -> None:
        self._operations["product", a.shape[2]] += len(a)
        out[:] = 1

    def outer(self, a: Residues, b: Residues, steps: tuple[int, ...], out: Residues) -> None:
        self._operations["term", a.shape[2]] += math.prod(steps[:3])
        out[:] = 1

    def weave(self, a: Residues, b: Residues, out: Residues) -> None:
        self._operations["weigh", a.shape[2]] += len(a) * a.shape[1] // 2
        out[:] = 1


@dataclass
class Count:
    """An evaluator that only counts operations. It takes the place of ``ServerKeys``.

    Attributes:
        operations: count for each (name, number of primes). Names are ``relinearise`` (with its
            rescaling), ``rescale`` alone, ``decompose`` (the
            digits of a ciphertext before its rotations), ``rotate`` (each rotation), ``product`` (of two
            ciphertexts), ``term`` (such a product in a matrix of sums), ``weigh`` (the product of a ciphertext, two
            polynomials, and a plaintext, as one term of a sum), ``encode`` (a plaintext), and ``add`` and ``affine``
            for each polynomial that is added to another one, or multiplied by a number.
        refreshes: for each refresh in order, the number of its ciphertexts, each with a pair of values in a slot.
    """

    parameters: Parameters
    floor: int
    operations: Counter[tuple[str, int]] = field(default_factory=Counter)
    refreshes: list[int] = field(default_factory=list)
    ring: Ring = field(init=False)

    def relinearise_and_rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Count a relinearisation with its rescaling for each ciphertext, and drop a prime."""
        return self._like("relinearise", x, x.level, x.scale / self.ring.parameters.primes[x.level])

    def rescale(self, x: Ciphertexts) -> Ciphertexts:
        """Count a rescaling for each ciphertext, and drop a prime."""
        return self._like("rescale", x, x.level, x.scale / self.ring.parameters.primes[x.level])

    def rotations(self, x: Ciphertexts, steps: Sequence[int]) -> Ciphertexts:
        """Count the digits of each ciphertext once, and each of its rotations."""
        moved = sum(step % (self.ring.degree // 2) != 0 for step in steps)
        self.operations["decompose", x.level + 1] += len(x)
        self.operations["rotate", x.level + 1] += len(x) * moved
        return self.ones(len(x) * len(steps), x.level + 1, x.scale)

    def conjugate(self, x: Ciphertexts) -> Ciphertexts:
        """Count the digits of each ciphertext, and one rotation."""
        self.operations["decompose", x.level + 1] += len(x)
        return self._like("rotate", x, x.level + 1, x.scale)

    def zeros(self, count: int, limbs: int, plus: Residues | None = None) -> Residues:
        """Return placeholder residues; their values do not matter."""
        return np.ones((count, 2, limbs, self.ring.degree), np.int64)

    def __post_init__(self) -> None:
        self.ring = _CountedRing(self.parameters, self.operations)
        self.refresh: Refresh | None = self._fresh

    def _fresh(self, x: Ciphertexts) -> Ciphertexts:
        self.refreshes.append(len(x))
        return self.ones(len(x), self.ring.parameters.limbs, x.scale / 2)

    def ones(self, count: int, limbs: int, scale: float) -> Ciphertexts:
        """Return placeholder ciphertexts, whose residues are all one."""
        return Ciphertexts(self.zeros(count, limbs).view(np.uint64), scale, self)

    def _like(self, name: str, x: Ciphertexts, limbs: int, scale: float) -> Ciphertexts:
        self.operations[name, x.level + 1] += len(x)
        return self.ones(len(x), limbs, scale)


def count_operations(
    layer: FoldedLayer,
    tokens: int,
    parameters: Parameters,
    first: bool = False,
    fresh: bool = False,
    released: Released | None = None,
) -> Count:
    """Count the operations of a block, apart from the matrix products of its linear maps.

    Args:
        first: whether this is the first block, whose input has only the primes that the embedding leaves. The
            embedding is counted with it.
        fresh: whether the protocol is "permuted". If so, inputs of later blocks have all primes, and outputs are
            reordered.
        released: the disclosed activations, whose selection is counted as well; None in the "permuted" protocol.
    """
    short = cast(Parameters, _Short(parameters, places_of(tokens)))
    floor, rows = messages.floor_of(parameters), messages.rows_limbs(parameters)
    count, layout = Count(short, floor), Packing(short, tokens)
    block = block_of(layer, layout)
    begun = rows if first else parameters.limbs if fresh else floor
    if first and not block.has_mask:
        count.rescale(count.ones(block.features, rows, parameters.scale))
        begun -= 1
        count.operations["encode", begun] += block.features  # the positions
    block(count.ones(block.inputs, begun, parameters.scale))
    if fresh:
        count_permutation(count, block.features, Packing(parameters, tokens))
    if released is not None:
        states = count.ones(block.features, messages.RELEASE_LIMBS, parameters.scale)
        select_released(states, released, layout, 1.0, 1.0)
    return count


def count_permutation(count: Count, features: int, layout: Packing) -> None:
    """Count the operations that reorder the samples of a full batch; ``features`` ciphertexts are combined in pairs."""

    def weigh(turned: Ciphertexts, giant: int) -> Ciphertexts:
        count.operations["weigh", turned.level + 1] += len(turned)
        return turned[:1]

    x = count.ones(-(-features // 2), messages.RELEASE_LIMBS, layout.parameters.scale)
    count.rescale(permute_samples(x, layout.samples, layout, weigh))
