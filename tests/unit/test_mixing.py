"""Weighted sums of vectors where they lie, against NumPy in float64: any size and place, nothing else is touched."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.linalg.kernels.weighted_sums import LINE, WIDTH, mixed

sizes = st.one_of(st.integers(1, 3 * WIDTH), st.integers(1, 2000))


def placed(count, n, begin, step, rng):
    """Vectors (count, n) in one buffer, the first ``begin`` numbers behind a cache line, ``step`` more than n apart."""
    room = np.empty(count * (n + step) + begin + LINE, np.float32)
    room[:] = rng.standard_normal(len(room))
    at = (-room.ctypes.data % LINE) // 4 + begin
    return room, at + np.arange(count) * (n + step)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 30), st.integers(1, 400), sizes, st.tuples(st.integers(0, 17), st.integers(0, 17)),
    st.sampled_from([0, 1, 16, 40]), st.integers(0, 99),
)  # fmt: skip
def test_sums_are_numpys_and_nothing_else_is_touched(rows, count, n, begins, step, seed):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, count)).astype(np.float32)
    read, x = placed(count, n, begins[0], 3, rng)
    written, y = placed(rows, n, begins[1], step, rng)  # lines begin alike in all, or not
    read_before, before = read.copy(), written.copy()
    mixed(weights, read.ctypes.data + 4 * x, written.ctypes.data + 4 * y, n)
    vectors = np.stack([read[at : at + n] for at in x]).astype(np.float64)
    want, size = weights.astype(np.float64) @ vectors, np.abs(weights.astype(np.float64)) @ np.abs(vectors)
    for at, row, bound in zip(y, want, size, strict=True):
        assert (np.abs(written[at : at + n] - row) <= 2**-23 * count * bound + 1e-30).all()
        before[at : at + n] = written[at : at + n]
    assert np.array_equal(before, written)
    assert np.array_equal(read_before, read)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 500), st.integers(0, 15), st.integers(0, 99))
def test_an_entry_has_the_same_bits_whatever_lies_beside_it(rows, count, n, begin, seed):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, count)).astype(np.float32)
    read, x = placed(count, n, begin, 1, rng)
    whole = np.zeros((rows, n), np.float32)
    mixed(weights, read.ctypes.data + 4 * x, whole.ctypes.data + 4 * n * np.arange(rows), n)
    i, at = rng.integers(rows), rng.integers(n)
    one = np.zeros(1, np.float32)
    mixed(weights[i : i + 1], read.ctypes.data + 4 * (x + at), np.array([one.ctypes.data]), 1)
    assert one[0].tobytes() == whole[i, at].tobytes()


def test_not_a_number_stays_in_its_column():
    x = np.ones((3, 200), np.float32)
    x[1, 70], x[2, 71] = np.nan, np.inf
    weights, y = np.array([[1, 0, 0], [1, 2, 3]], np.float32), np.zeros((2, 200), np.float32)
    mixed(weights, x.ctypes.data + 800 * np.arange(3), y.ctypes.data + 800 * np.arange(2), 200)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 70], [0, 71], [1, 70]]  # 0 times infinity is none either
    assert y[1, 71] == np.inf
    assert y[:, 72].tolist() == [1, 6]
