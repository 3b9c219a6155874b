"""Our own encryptions of zero: distributions of what is random in them, and what the key owner finds in them."""

import math

import numpy as np
import pytest

from fedfm.encrypted.ckks import zero_encryptions
from fedfm.encrypted.ckks.ring import Parameters

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import encoding, seal

PARAMETERS = Parameters()
CLIENT = seal.ClientKeys(PARAMETERS)
SERVER = seal.ServerKeys(PARAMETERS, CLIENT.public())
N = PARAMETERS.degree


def test_errors_are_centred_binomial():
    x = zero_encryptions.errors(8, N)
    assert abs(x.mean()) < 5 * math.sqrt(10.5 / x.size)
    assert x.var() == pytest.approx(10.5, rel=5 * math.sqrt(2 / x.size))
    assert np.abs(x).max() <= 21
    assert not np.array_equal(x[0], x[1])


def test_factors_are_ternary():
    x = zero_encryptions.ternary(8, N)
    for value in (-1, 0, 1):
        assert (x == value).mean() == pytest.approx(1 / 3, abs=5 * math.sqrt(2 / 9 / x.size))


def test_draws_never_repeat():
    assert not np.array_equal(zero_encryptions.words(1, N), zero_encryptions.words(1, N))
    a, b = (SERVER.zeros(1, 3) for _ in range(2))
    assert (a == b).mean() < 1e-3


@pytest.mark.parametrize("limbs", [1, 3, 5])
def test_encryptions_of_zero_hold_noise_alone(limbs):
    made = SERVER.zeros(3, limbs)
    found = encoding.to_coefficients(CLIENT.decrypt_polynomials(made), CLIENT.ring)
    # e u + e0 + e1 s, both keys ternary: variance 10.5 (4 N / 3 + 1)
    assert found.std() == pytest.approx(math.sqrt(10.5 * (4 * N / 3 + 1)), rel=0.05)
    primes = np.array(PARAMETERS.primes[:limbs])[:, None]
    assert ((made >= 0) & (made < primes)).all()
    for polynomial in range(2):  # uniform: five standard errors
        share = made[:, polynomial] / primes
        assert abs(share.mean() - 0.5) < 5 / math.sqrt(12 * share.size)


def test_a_client_adds_one_error_and_no_more():
    plain = np.random.default_rng(0).integers(-(2**40), 2**40, (2, N))
    made = CLIENT.encrypt_polynomials(encoding.modulo(plain, 5, CLIENT.ring))
    off = encoding.to_coefficients(CLIENT.decrypt_polynomials(made), CLIENT.ring) - plain
    assert 3.1 < off.std() < 3.4
    assert np.abs(off).max() <= 21
