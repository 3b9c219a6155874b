"""Matrices U V of low rank r, kept as factors: sums, inner products and best approximations without the dense product.

Cost for matrices of size (m, n), in float64:

- all inner products of K matrices of rank r: O(K^2 r^2 (m + n))
- truncation from rank R: O(R^2 (m + n))

The dense matrices would need O(K m n) memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Factors = tuple[Tensor, Tensor]  # U (m, r), V (r, n); LoRA's update s B A is (s B, A)


def stack(terms: Iterable[tuple[float, Factors]]) -> Factors:
    """The factors of sum_k c_k U_k V_k: [c_1 U_1, c_2 U_2, ...] (m, R) and [V_1; V_2; ...] (R, n), R = sum_k r_k.

    Args:
        terms: (c_k, (U_k, V_k)) with U_k (m, r_k) and V_k (r_k, n); ranks may differ.

    Returns:
        The factors in float64; their product is exact up to the rounding of c_k U_k.

    Raises:
        ValueError: there are no terms, or their sizes differ.

    Example:
        >>> one, two = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
        >>> u, v = stack([(0.5, (one, one.T)), (0.5, (two, two.T))])
        >>> (u @ v).tolist()
        [[0.5, 0.0], [0.0, 0.5]]
    """
    terms = list(terms)
    if not terms:
        raise ValueError("no matrices to add")
    if len({(u.shape[0], v.shape[1]) for _, (u, v) in terms}) > 1 or any(u.shape[1] != len(v) for _, (u, v) in terms):
        raise ValueError(
            f"matrices of different sizes: {[(tuple(u.shape), tuple(v.shape)) for _, (u, v) in terms][:4]}"
        )
    return torch.cat([c * u.double() for c, (u, _) in terms], 1), torch.cat([v.double() for _, (_, v) in terms])


def inners(matrices: Sequence[Factors]) -> Tensor:
    """All inner products (K, K), float64, as two matrix products of the stacked factors.

    The stacked factors are U = [U_1, U_2, ...] and V = [V_1; V_2; ...]. The inner product
    <U_i V_i, U_k V_k> = tr((U_i^T U_k)(V_k V_i^T)) is the sum of the entries of block (i, k) in the elementwise product
    of U^T U and V V^T.
    """
    if not matrices:
        return torch.zeros(0, 0, dtype=torch.float64)
    u, v = stack([(1.0, x) for x in matrices])  # (m, R), (R, n)
    both = (u.T @ u) * (v @ v.T)  # (R, R)
    owner = torch.repeat_interleave(torch.tensor([len(v_k) for _, v_k in matrices]))  # (R,)
    rows = torch.zeros(len(matrices), len(owner), dtype=torch.float64).index_add_(0, owner, both)
    return torch.zeros(len(matrices), len(matrices), dtype=torch.float64).index_add_(1, owner, rows)


def truncate(x: Factors, rank: int) -> tuple[Factors, Tensor]:
    """The best approximation of U V by a matrix of rank at most ``rank`` (Eckart and Young 1936).

    With the QR decompositions U = Q_1 R_1 and V^T = Q_2 R_2, and the singular value decomposition P S W of R_1 R_2^T,
    the singular value decomposition of U V is (Q_1 P) S (W Q_2^T).

    Returns:
        The factors (left (m, r'), right (r', n)) and all singular values (k,), descending, in float64, with
        r' = min(rank, k) and k = min(R, m, n). The left factor contains the singular values. The rows of the right
        factor are orthonormal. In each row, the first entry of largest absolute value is positive, so that the factors
        are unique. The squared error is the sum of the squares of the singular values after the first r'.
    """
    u, v = x[0].double(), x[1].double()
    q1, r1 = torch.linalg.qr(u)  # (m, min(m, R)), (min(m, R), R)
    q2, r2 = torch.linalg.qr(v.T)  # (n, min(n, R)), (min(n, R), R)
    p, s, w = torch.linalg.svd(r1 @ r2.T, full_matrices=False)
    r = min(rank, len(s))
    left, right = q1 @ p[:, :r], w[:r] @ q2.T  # (m, r), (r, n)
    if r:
        sign = right.gather(1, right.abs().argmax(1, keepdim=True)).sign()  # (r, 1)
        left, right = left * sign.T, right * sign
    return (left * s[:r], right), s


def compress(x: Factors) -> Factors:
    """The same matrix with factors of rank at most min(m, n), from its singular value decomposition.

    Stacked factors contain the columns of each term; the new factors reveal only the sum.
    """
    return truncate(x, min(x[0].shape[0], x[1].shape[1]))[0]


def pad(x: Factors, rank: int) -> Factors:
    """The same matrix with factors of this rank, padded with zeros.

    Raises:
        ValueError: the matrix has factors of a larger rank.
    """
    u, v = x
    more = rank - len(v)
    if more < 0:
        raise ValueError(f"factors of rank {len(v)}, larger than {rank}")
    return torch.nn.functional.pad(u, (0, more)), torch.nn.functional.pad(v, (0, 0, 0, more))
