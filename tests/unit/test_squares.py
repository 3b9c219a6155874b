"""Inner products of vectors where they lie, against NumPy in float64: any number, length and place."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg.kernels import gram_matrix


def products(x, near, cuts=()):
    """Of vectors (K, n), added in pieces that end at the cuts."""
    totals = gram_matrix.room(len(x))
    addresses = x.ctypes.data + x.strides[0] * np.arange(len(x))
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        gram_matrix.add(totals, addresses + 4 * start, near, stop - start)
    return gram_matrix.found(totals, len(x))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 70), st.integers(1, 1300), st.integers(0, 17), st.booleans(), st.integers(0, 99))
def test_they_are_numpys_and_nothing_is_touched(count, n, begin, centred, seed):
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((count, n + begin)).astype(np.float32) + 3 * centred
    before, x = whole.copy(), whole[:, begin:]
    near = x.mean(1) if centred else np.zeros(count, np.float32)
    got = products(x, near)
    exact = x.astype(np.float64) - near[:, None].astype(np.float64)
    size = np.abs(exact) @ np.abs(exact).T
    assert (np.abs(got - exact @ exact.T) <= 2**-23 * (min(n, gram_matrix.COLUMNS) + 4) * size + 1e-30).all()
    np.testing.assert_array_equal(got, got.T)
    np.testing.assert_array_equal(whole, before)


@pytest.mark.parametrize("count", [3, 40])
def test_pieces_of_whole_panels_give_the_bits_of_all_at_once(count):
    x = np.random.default_rng(0).standard_normal((count, 9 * gram_matrix.COLUMNS + 5)).astype(np.float32)
    near = np.zeros(count, np.float32)
    cuts = [gram_matrix.COLUMNS, 4 * gram_matrix.COLUMNS]
    assert products(x, near).tobytes() == products(x, near, cuts).tobytes()


def test_not_a_number_stays_with_its_vector():
    x = np.ones((20, 300), np.float32)
    x[3, 280] = np.nan
    got = products(x, np.zeros(20, np.float32))
    assert np.isnan(got[3]).all()
    assert np.isnan(got[:, 3]).all()
    rest = np.delete(np.delete(got, 3, 0), 3, 1)
    assert (rest == 300).all()
