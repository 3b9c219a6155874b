"""Relinearisation, rotations and rescaling on residues, with the keys that SEAL made.

The results of :meth:`KeySwitching.relinearise` and :meth:`KeySwitching.rescale` are those of SEAL, bit for bit. A
rotation gives the same value with less noise, because its digits are centred; they are those of the ciphertext before
the rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedfm.encrypted.ckks import switch_kernels
from fedfm.encrypted.ckks.ring import Residues, Ring


class KeySwitching:
    """The evaluation keys of one client.

    Args:
        ring: the ring of the parameters.
        relinearisation: the key (digits, 2, primes, N) for the square of the secret.
        rotations: the keys for rotated secrets by their Galois element, each (digits, 2, primes, N).
    """

    def __init__(self, ring: Ring, relinearisation: Residues, rotations: Mapping[int, Residues]) -> None:
        primes = [int(q) for q in ring.primes]
        inverses = [[0 if p == q else pow(q, -1, p) for p in primes] for q in primes]
        self._special = len(primes) - 1
        self._tables = (ring.primes, np.array(inverses, np.int64), ring.roots, ring.inverse_roots, ring.shrink)
        self._relinearisation = relinearisation
        self._places = {element: _places(element, ring.degree) for element in rotations}
        self._index = {element: number for number, element in enumerate(rotations)}
        # Sums of digits times a key are rotated at the end. So the keys are rotated back before.
        shape = (len(rotations), *relinearisation.shape)
        self._rotations = np.empty(shape, np.int64)
        for number, (element, key) in enumerate(rotations.items()):
            self._rotations[number] = key[..., np.argsort(self._places[element])]

    def has(self, element: int) -> bool:
        """Whether there is a key for this Galois element; the identity needs none."""
        return element == 1 or element in self._index

    def relinearise(self, x: Residues, drop: bool = False) -> Residues:
        """Reduce three polynomials to two: (rows, 3, limbs, N) -> (rows, 2, limbs, N).

        With ``drop``, the result is also divided by its last prime, as by :meth:`rescale`.
        """
        rows, _, limbs, degree = x.shape
        out = np.empty((rows, 2, limbs - drop, degree), np.int64)
        switch_kernels.relinearise(x, self._relinearisation, self._moduli(limbs), out, int(drop), *self._tables)
        return out

    def rotations(self, x: Residues, elements: Sequence[int]) -> Residues:
        """Apply several automorphisms to each ciphertext: (rows, 2, limbs, N) -> (elements, rows, 2, limbs, N).

        The digits of a ciphertext are computed once for all of them.
        """
        out = np.empty((len(elements), *x.shape), np.int64)
        moved = np.array([k for k, element in enumerate(elements) if element != 1], np.int64)
        for k, element in enumerate(elements):
            if element == 1:
                out[k] = x
        which = np.array([self._index[elements[k]] for k in moved], np.int64)
        places = np.stack([self._places[elements[k]] for k in moved])
        switch_kernels.rotate(x, self._rotations, which, places, moved, self._moduli(x.shape[2]), out, *self._tables)
        return out

    def rescale(self, x: Residues) -> Residues:
        """Divide by the last prime, with rounding, and drop this prime."""
        rows, polynomials, limbs, degree = x.shape
        out = np.empty((rows, polynomials, limbs - 1, degree), np.int64)
        switch_kernels.rescale(x, np.arange(limbs), out, *self._tables)
        return out

    def _moduli(self, limbs: int) -> Residues:
        """Return the indexes of the first primes and of the special prime."""
        return np.array([*range(limbs), self._special], np.int64)


def _places(element: int, degree: int) -> Residues:
    """Return where each value of the rotated polynomial is among those of the polynomial itself, (N,).

    In bit-reversed order, entry i is the value at the root with the exponent 2 reverse(i) + 1.
    """
    bits = degree.bit_length() - 1
    numbers = np.arange(degree)
    reverse = np.sum([((numbers >> i) & 1) << (bits - 1 - i) for i in range(bits)], axis=0)
    exponent = (2 * reverse + 1) * element % (2 * degree)
    return np.asarray(reverse[(exponent - 1) // 2], np.int64)
