"""The noise has the distribution that the accountant assumes, and depends on its key alone."""

import hmac
import math
import struct

import numpy as np
import pytest
from scipy import stats

from fedfm.errors import InputError
from fedfm.privacy import noise

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def draws():
    return noise.gaussian(KEY, "law", (400_001,))


def test_moments(draws):
    n = len(draws)
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        assert abs((draws**power).mean() - expected) < 4 * math.sqrt(variance / n)
    # +-1.1% of sigma is what an audit has to see: here 400,001 draws pin it to 0.4%.
    assert abs(draws.std() - 1) < 0.004


def test_kolmogorov_smirnov(draws):
    assert stats.kstest(draws, "norm").pvalue > 0.01
    half = len(draws) // 2
    assert stats.kstest(draws[:half], "norm").pvalue > 0.01  # cosines
    assert stats.kstest(draws[half + 1 :], "norm").pvalue > 0.01  # sines


def test_tails(draws):
    for z in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(z) * len(draws)
        assert abs((np.abs(draws) > z).sum() - expected) < 4 * math.sqrt(expected)


def test_the_least_and_largest_words_are_finite(monkeypatch):
    for byte, radius in ((b"\0", math.sqrt(130 * math.log(2))), (b"\xff", 0.0)):
        monkeypatch.setattr(noise, "stream", lambda key, purpose, length, byte=byte: byte * length)
        pair = noise.gaussian(KEY, "x", (2,))
        assert np.linalg.norm(pair) == pytest.approx(radius, rel=1e-12, abs=1e-7)


def test_no_two_numbers_of_a_stream_are_dependent(draws):
    half = (len(draws) + 1) // 2
    a, b = draws[: half - 1], draws[half : 2 * half - 1]
    pairs = [(draws[lag:], draws[:-lag]) for lag in (1, 2, half)] + [(a**2, b**2), (np.abs(a), b)]
    for u, v in pairs:
        assert abs(np.corrcoef(u, v)[0, 1]) < 4 / math.sqrt(len(u))


def test_same_key_purpose_and_shape_give_the_same_bits():
    assert noise.gaussian(KEY, "a", (7, 3)).tobytes() == noise.gaussian(KEY, "a", (7, 3)).tobytes()
    assert noise.gaussian(KEY, "a", (7, 3)).shape == (7, 3)
    assert noise.gaussian(KEY, "a", (0,)).shape == (0,)
    assert noise.gaussian(KEY, "a", ()).shape == ()


@pytest.mark.parametrize(
    ("key", "purpose", "shape"),
    [
        (KEY, "b", (100_000,)),
        (KEY, "a ", (100_000,)),
        (KEY, "", (100_000,)),
        (KEY, "a", (100_000, 1)),
        (bytes(32), "a", (100_000,)),
        (KEY[:31] + b"\x20", "a", (100_000,)),
        (KEY + b"\0", "a", (100_000,)),
    ],
)
def test_other_keys_purposes_and_shapes_are_independent(key, purpose, shape):
    a, b = noise.gaussian(KEY, "a", (100_000,)), noise.gaussian(key, purpose, shape).ravel()
    assert not np.isin(b, a).any()  # no shifted copy either
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))


def chacha20(key, blocks):
    """RFC 8439, Section 2.3, with a zero nonce: a second implementation."""

    def quarter(s, a, b, c, d):
        for x, y, z, r in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[x] = (s[x] + s[y]) & 0xFFFFFFFF
            s[z] = ((s[z] ^ s[x]) << r | (s[z] ^ s[x]) >> (32 - r)) & 0xFFFFFFFF

    out = b""
    for counter in range(blocks):
        state = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
        work = list(state)
        for _ in range(10):
            for i in range(4):
                quarter(work, i, 4 + i, 8 + i, 12 + i)
            for i in range(4):
                quarter(work, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        out += struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(work, state, strict=True)))
    return out


def test_the_stream_is_chacha20_under_a_key_from_hkdf():
    extracted = hmac.digest(bytes(32), KEY, "sha256")  # RFC 5869
    subkey = hmac.digest(extracted, b"fedfm noise 2\x1f160\x1fc3/moments/7\x1f(20,)" + b"\x01", "sha256")
    words = struct.unpack("<24Q", chacha20(subkey, 3))
    radius = [math.sqrt(-2 * math.log((w + 0.5) / 2**64)) for w in words[:10]]
    angle = [2 * math.pi * (w >> 11) / 2**53 for w in words[10:20]]
    expected = [r * f(t) for f in (math.cos, math.sin) for r, t in zip(radius, angle, strict=True)]
    np.testing.assert_allclose(noise.gaussian(KEY, "c3/moments/7", (20,)), expected, rtol=1e-12, atol=1e-14)
    assert chacha20(bytes(32), 1).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")  # RFC 8439, A.1, vector 1


def test_symmetric_noise():
    d, count = 6, 4000
    zeros, scale = np.zeros(d * (d + 1) // 2), noise.packed_scale(d)
    drawn = np.array([noise.unpack(noise.cover(KEY, f"matrix {i}", zeros, scale), d) for i in range(count)])
    assert np.array_equal(drawn, drawn.transpose(0, 2, 1))
    np.testing.assert_allclose(drawn.mean(axis=0), 0, atol=4.5 / math.sqrt(count))
    expected = np.where(np.eye(d, dtype=bool), 1.0, 0.5)
    np.testing.assert_allclose(drawn.var(axis=0), expected, rtol=4.5 * math.sqrt(2 / count))
    # On (M_jj, sqrt(2) M_jk), whose L2 norm is the Frobenius norm, the noise is white: the mechanism is a Gaussian one.
    row, column = np.tril_indices(d)
    svec = drawn[:, row, column] * np.where(row == column, 1.0, math.sqrt(2))
    np.testing.assert_allclose(np.cov(svec.T), np.eye(len(row)), atol=5 / math.sqrt(count))
    assert stats.kstest(svec.ravel(), "norm").pvalue > 0.01
    squared = (drawn**2).sum(axis=(1, 2))
    assert stats.kstest(squared, stats.chi2(d * (d + 1) // 2).cdf).pvalue > 0.01


def test_symmetric_noise_is_the_symmetric_part_of_independent_noise():
    rng, d = np.random.default_rng(0), 3
    z = rng.normal(size=(20_000, d, d))
    sym = 0.5 * (z + z.transpose(0, 2, 1))
    assert sym[:, 0, 0].var() == pytest.approx(1.0, rel=0.05)
    assert sym[:, 0, 1].var() == pytest.approx(0.5, rel=0.05)


def test_unpack():
    matrix = noise.unpack(np.arange(6.0), 3)
    assert matrix.tolist() == [[0, 1, 3], [1, 2, 4], [3, 4, 5]]


def test_the_lattice_hides_last_bits_and_moves_nothing_else():
    values = np.random.default_rng(0).normal(size=1000) * 100
    for sigma in (0.05, 1.0, 3.8454, 1e6):
        on = noise.on_grid(values, sigma)
        step = 2.0 ** (math.floor(math.log2(sigma)) + 1 - 20)
        assert np.array_equal(on / step, np.round(on / step))
        assert np.abs(on - values).max() <= step / 2 <= sigma * 1e-6
        # 2^20 lattice points a sigma, 2^11 times as many floats and more around each of them
        assert step > 2**10 * np.spacing(np.abs(values).max())


@pytest.mark.parametrize("key", [b"", b"short", bytes(15)])
def test_a_short_key_is_refused(key):
    with pytest.raises(InputError, match="at least 16"):
        noise.gaussian(key, "a", (3,))
