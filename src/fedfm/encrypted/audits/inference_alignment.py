"""Undo the permutation of a batch: for each state before a block, find the same sample's state after the block.

BlindFed (arXiv:2502.01289) uses a new permutation of the batch's samples for each block. A residual block changes its
input only a little, so a sample's state after the block is similar to its state before.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array


def align(before: Array, after: Array) -> Array:
    """Return, for each sample before the block, the position of its state after the block.

    The function computes the cosines of the centred states for all pairs, and finds the assignment with the largest
    sum of cosines.

    Args:
        before, after: (n, T, d), or (n, d); the function centres each of them over the samples.

    Returns:
        A permutation (n,) of integers.

    Raises:
        ValueError: the shapes differ, or there are fewer than two samples.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(5, 2, 8))
        >>> order = np.array([3, 1, 4, 0, 2])
        >>> align(x, (x + 0.1)[order]).tolist() == np.argsort(order).tolist()
        True
    """
    from scipy.optimize import linear_sum_assignment

    if before.shape != after.shape or len(before) < 2:
        raise ValueError(f"states of shapes {before.shape} and {after.shape}: expected two states of one shape, n >= 2")
    a, b = (_directions(x) for x in (before, after))
    return np.asarray(linear_sum_assignment(a @ b.T, maximize=True)[1])


def shuffle(states: Array, seed: int) -> tuple[Array, Array]:
    """Permute the samples in a new order for each block: states (n, L, ...) -> states (n, L, ...), orders (L, n)."""
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(len(states)) for _ in range(states.shape[1])])
    return np.stack([states[order, level] for level, order in enumerate(orders)], axis=1), orders


def aligned_shares(mixed: Array, orders: Array) -> list[float]:
    """Return the fraction of the samples that :func:`align` matches, for each pair of consecutive blocks: (L - 1,).

    Args:
        mixed, orders: from :func:`shuffle`.
    """
    shares = []
    for level in range(1, mixed.shape[1]):
        guess = align(mixed[:, level - 1], mixed[:, level])
        shares.append(float((orders[level][guess] == orders[level - 1]).mean()))
    return shares


def _directions(x: Array) -> Array:
    """Flatten and centre the vectors, and scale each to length 1: (n, ...) -> (n, D)."""
    flat = x.reshape(len(x), -1).astype(np.float64)
    flat = flat - flat.mean(0)
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12))
