"""Factors of low rank against the dense matrices that they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg import low_rank


def draw(seed, m, n, r, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, r, generator=generator, dtype=dtype), torch.randn(r, n, generator=generator, dtype=dtype)


def dense(x):
    return x[0].double() @ x[1].double()


SIZES = {"seed": st.integers(0, 10**6), "m": st.integers(1, 9), "n": st.integers(1, 9)}
RANKS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(deadline=None, max_examples=50)
@given(**SIZES, ranks=RANKS)
def test_a_stack_is_the_weighted_sum(seed, m, n, ranks):
    terms = [((-1) ** k / (k + 1), draw(seed + k, m, n, r)) for k, r in enumerate(ranks)]
    u, v = low_rank.stack(terms)
    assert u.shape == (m, sum(ranks))
    assert v.shape == (sum(ranks), n)
    torch.testing.assert_close(u @ v, sum(c * dense(x) for c, x in terms), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=50)
@given(**SIZES, ranks=RANKS)
def test_inner_products(seed, m, n, ranks):
    matrices = [draw(seed + k, m, n, r) for k, r in enumerate(ranks)]
    flat = torch.stack([dense(x).reshape(-1) for x in matrices])
    torch.testing.assert_close(low_rank.inners(matrices), flat @ flat.T, rtol=1e-10, atol=1e-10)


@settings(deadline=None, max_examples=50)
@given(**SIZES, r=st.integers(1, 12), rank=st.integers(0, 12))
def test_a_cut_is_the_best_one(seed, m, n, r, rank):
    x = draw(seed, m, n, r)
    (u, v), sigma = low_rank.truncate(x, rank)
    p, s, w = torch.linalg.svd(dense(x), full_matrices=False)
    k = min(m, n, r)
    assert len(sigma) == k
    assert u.shape == (m, min(rank, k))
    torch.testing.assert_close(sigma, s[:k], rtol=1e-9, atol=1e-9)
    best = (p[:, :rank] * s[:rank]) @ w[:rank]
    torch.testing.assert_close((dense(x) - u @ v).norm() ** 2, sigma[rank:].square().sum(), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close((dense(x) - best).norm(), (dense(x) - u @ v).norm(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(v @ v.T, torch.eye(len(v), dtype=torch.float64), rtol=1e-9, atol=1e-9)
    for row in v:
        assert float(row[row.abs().argmax()]) > 0


def test_the_pair_does_not_depend_on_signs():
    u, v = draw(3, 5, 4, 2)
    for a, b in zip(low_rank.truncate((u, v), 2)[0], low_rank.truncate((-u, -v), 2)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_factors_longer_than_the_matrix_are_compressed_without_loss():
    x = draw(0, 4, 3, 9)
    assert [tuple(t.shape) for t in low_rank.compress(x)] == [(4, 3), (3, 3)]
    torch.testing.assert_close(dense(low_rank.compress(x)), dense(x), rtol=1e-12, atol=1e-12)


def test_compressed_factors_do_not_tell_the_terms_of_a_sum():
    one, two = draw(0, 6, 5, 1), draw(1, 6, 5, 1)
    x = low_rank.stack([(1.0, one), (1.0, two)])
    # The same sum of other terms: (u1 + u2) v1 + u2 (v2 - v1).
    y = low_rank.stack([(1.0, (one[0] + two[0], one[1])), (1.0, (two[0], two[1] - one[1]))])
    for a, b in zip(low_rank.compress(x), low_rank.compress(y), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_padding_changes_nothing():
    x = draw(1, 4, 3, 2)
    u, v = low_rank.pad(x, 5)
    assert (u.shape, v.shape) == ((4, 5), (5, 3))
    assert torch.equal(dense((u, v)), dense(x))
    with pytest.raises(ValueError, match="larger than 1"):
        low_rank.pad(x, 1)


def test_factors_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="different sizes"):
        low_rank.stack([(1.0, draw(0, 4, 3, 2)), (1.0, draw(0, 3, 4, 2))])
    with pytest.raises(ValueError, match="no matrices"):
        low_rank.stack([])
    assert low_rank.inners([]).shape == (0, 0)
    assert low_rank.inners([draw(0, 2, 2, 0)]).item() == 0.0
