"""Products and transposes of small matrices against NumPy's."""

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg.kernels import matmul
from fedfm.linalg.kernels.jit import EXACT
from fedfm.linalg.kernels.simd import COUNT


@numba.njit(fastmath=EXACT)
def product(out, o, down, width, add, a, p, row, step, rows, b, q, under, n):
    matmul.product(out, o, down, width, add, a, p, row, step, rows, b, q, under, n)


@numba.njit(fastmath=EXACT)
def transpose(x, at, under, n, wide, size, to, o):
    matmul.transpose(x, at, under, n, wide, size, to, o)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(1, 35),
    n=st.integers(0, 40),
    lanes=st.integers(1, 5),
    add=st.booleans(),
    turned=st.booleans(),
    offset=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_a_product_is_numpys_and_touches_nothing_else(rows, n, lanes, add, turned, offset, seed):
    rng, width = np.random.default_rng(seed), lanes * COUNT
    a, b = rng.normal(size=(rows, n)).astype(np.float32), rng.normal(size=(n, width + offset)).astype(np.float32)
    before = rng.normal(size=(rows + 1, width + offset)).astype(np.float32)
    out = np.concatenate([np.zeros(offset, np.float32), before.reshape(-1)])
    flat, row, step = (a.T.reshape(-1), 1, rows) if turned else (a.reshape(-1), n, 1)
    left = np.concatenate([np.full(offset, np.nan, np.float32), flat])
    product(out, offset, width + offset, width, add, left, offset, row, step, rows, b.reshape(-1), 0, width + offset, n)
    got = out[offset:].reshape(before.shape)
    want = a.astype(float) @ b[:, :width].astype(float) + (before[:rows, :width] if add else 0.0)
    np.testing.assert_allclose(got[:rows, :width], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got[rows], before[rows])
    np.testing.assert_array_equal(got[:rows, width:], before[:rows, width:])


@pytest.mark.parametrize(("rows", "n"), [(3, 20), (20, 3), (9, 9)])
def test_an_entry_has_the_same_bits_in_any_tile(rows, n):
    """Whether it is computed beside 31 others of its row or beside 15."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=rows * n).astype(np.float32), rng.normal(size=(n, 3 * COUNT)).astype(np.float32)
    whole, part = np.empty((rows, 3 * COUNT), np.float32), np.empty((rows, COUNT), np.float32)
    product(whole.reshape(-1), 0, 3 * COUNT, 3 * COUNT, False, a, 0, n, 1, rows, b.reshape(-1), 0, 3 * COUNT, n)
    for at in range(0, 3 * COUNT, COUNT):
        product(part.reshape(-1), 0, COUNT, COUNT, False, a, 0, n, 1, rows, b.reshape(-1), at, 3 * COUNT, n)
        np.testing.assert_array_equal(whole[:, at : at + COUNT], part)


@settings(deadline=None)
@given(n=st.integers(1, 40), lanes=st.integers(1, 4), seed=st.integers(0, 1000))
def test_a_transposed_block_has_zeros_behind_it(n, lanes, seed):
    size, wide = lanes * COUNT, -(-n // COUNT) * COUNT
    x = np.random.default_rng(seed).normal(size=(n, size + 5)).astype(np.float32)
    to = np.full(7 + size * wide, np.nan, np.float32)
    transpose(x.reshape(-1), 3, size + 5, n, wide, size, to, 7)
    got = to[7:].reshape(size, wide)
    np.testing.assert_array_equal(got[:, :n], x[:, 3 : 3 + size].T)
    assert not got[:, n:].any()
    assert np.isnan(to[:7]).all()
