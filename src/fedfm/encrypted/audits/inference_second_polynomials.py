"""Compute the weights of a linear layer from the second polynomials of its encrypted output.

A CKKS ciphertext has two polynomials, c0 and c1. A product with a matrix W acts on both: c1 of output i is
sum_j W_ij c1_j, with integers modulo each prime. The client that encrypted the input knows c1_j, and can solve for W.
An encryption of zero that is added to the output prevents this, because c1 of the output is then uniform.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array


def solve_modulo(rows: Array, right: Array, prime: int) -> Array:
    """Return the solution X of ``rows`` X = ``right`` modulo a prime, with entries in (-prime/2, prime/2).

    Args:
        rows: (n, n) integers in [0, prime).
        right: (n, m) integers in [0, prime).

    Raises:
        ValueError: the matrix is singular modulo the prime.

    Example:
        >>> solve_modulo(np.array([[2, 1], [1, 1]]), np.array([[1], [3]]), 97).ravel().tolist()
        [-2, 5]
    """
    a = np.concatenate([rows, right], axis=1).astype(object)  # Python integers, since products have up to 98 bits
    for k in range(len(a)):
        pivot = next((i for i in range(k, len(a)) if a[i, k] % prime), None)
        if pivot is None:
            raise ValueError("the matrix is singular modulo the prime")
        a[[k, pivot]] = a[[pivot, k]]
        a[k] = a[k] * pow(int(a[k, k]), -1, prime) % prime
        others = [i for i in range(len(a)) if i != k]
        a[others] = (a[others] - a[others, k : k + 1] * a[k]) % prime
    found = a[:, len(rows) :]
    return np.where(found > prime // 2, found - prime, found).astype(np.int64)


def weights_of(inputs: Array, outputs: Array, prime: int) -> Array:
    """Compute integer weights (m, n) from second polynomials modulo one prime.

    Args:
        inputs: (n, N), second polynomials of the encrypted inputs, N >= n.
        outputs: (m, N), second polynomials of the layer's outputs before any rescaling.

    Raises:
        ValueError: the first n coefficients do not determine the weights.
    """
    n = len(inputs)
    return np.asarray(solve_modulo(inputs[:, :n].T, outputs[:, :n].T, prime).T)
