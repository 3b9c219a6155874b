"""Primitives of secure aggregation, against their definitions, published vectors and independent computation."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.privacy.crypto import keys, masks, shamir
from fedfm.privacy.crypto.fixed_point import FixedPoint

SECRETS = st.integers(0, shamir.PRIME - 1)


# --- secret sharing --------------------------------------------------------------------------------------------------


def test_the_field_is_prime():
    for base in (2, 3, 5, 7, 11, 13, 17):  # Miller and Rabin's test; p - 1 = 2 odd
        assert pow(base, (shamir.PRIME - 1) // 2, shamir.PRIME) in (1, shamir.PRIME - 1)
    assert shamir.PRIME % 4 == 3
    assert shamir.PRIME.bit_length() == 256


@given(SECRETS, st.integers(1, 6), st.permutations(range(1, 11)), st.integers(0, 4))
def test_any_threshold_of_shares_gives_the_secret(secret, threshold, order, more):
    shares = dict(enumerate(shamir.split(secret, threshold, 10), 1))
    assert shamir.combine({x: shares[x] for x in order[: threshold + more]}, threshold) == secret


@given(SECRETS, SECRETS, st.integers(2, 5))
def test_fewer_shares_fit_every_secret(secret, other, threshold):
    """Through threshold - 1 shares and any other secret at 0 passes a polynomial of the degree."""
    shares = dict(enumerate(shamir.split(secret, threshold, threshold), 1))
    known = {x: shares[x] for x in range(1, threshold)}
    with pytest.raises(ValueError, match="are needed"):
        shamir.combine(known, threshold)
    points = [(0, other), *known.items()]
    last = sum(
        y * Fraction(np.prod([Fraction(threshold - b, a - b) for b, _ in points if b != a], initial=Fraction(1)))
        for a, y in points
    )
    forged = int(last.numerator * pow(last.denominator, -1, shamir.PRIME)) % shamir.PRIME
    assert shamir.combine({**known, threshold: forged}, threshold) == other


@given(SECRETS, st.integers(1, 4), st.integers(1, shamir.PRIME - 1), st.integers(0, 4))
def test_a_wrong_share_among_more_than_needed_is_found(secret, threshold, off, which):
    shares = dict(enumerate(shamir.split(secret, threshold, threshold + 1), 1))
    x = 1 + which % len(shares)
    with pytest.raises(ValueError, match="wrong"):
        shamir.combine({**shares, x: (shares[x] + off) % shamir.PRIME}, threshold)


def test_shares_worked_by_hand(monkeypatch):
    monkeypatch.setattr(keys, "entropy", lambda n: (7).to_bytes(n, "little"))
    assert shamir.split(5, 2, 3) == [12, 19, 26]  # 5 + 7 x
    assert shamir.split(5, 3, 3) == [19, 47, 89]  # 5 + 7 x + 7 x^2


@pytest.mark.parametrize("case", [(shamir.PRIME, 1, 1), (-1, 1, 1), (1, 3, 2), (1, 0, 2)])
def test_invalid_secrets_and_thresholds_are_refused(case):
    with pytest.raises(ValueError, match="threshold"):
        shamir.split(*case)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_agreement_is_that_of_rfc_7748():
    """Section 6.1: Bob's keys."""
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert keys.public_of(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"


def test_both_sides_agree_on_a_key_for_each_context():
    a, b = keys.entropy(32), keys.entropy(32)
    found = {keys.agree(x, keys.public_of(y), "x", 1) for x, y in ((a, b), (b, a))}
    assert len(found) == 1
    assert not found & {keys.agree(a, keys.public_of(b), *context) for context in (("x", "1"), ("x", 2), ("y", 1), ())}


def test_a_point_of_small_order_is_refused():
    with pytest.raises(ValueError, match=r".*"):
        keys.agree(keys.entropy(32), bytes(32), "x")


PARTS = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(-300, 300))


@given(st.lists(PARTS, max_size=4), st.lists(PARTS, max_size=4))
def test_two_contexts_never_encode_alike(a, b):
    assert (keys.encode(*a) == keys.encode(*b)) == ([(type(x), x) for x in a] == [(type(x), x) for x in b])


def test_changed_data_another_key_or_context_do_not_decrypt():
    key, sealed = bytes(32), keys.seal(bytes(32), b"share", "a", 1)
    assert keys.unseal(key, sealed, "a", 1) == b"share"
    assert len(sealed) == len(b"share") + keys.SEALED
    for bit in range(8 * len(sealed)):
        wrong = bytearray(sealed)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="do not fit"):
            keys.unseal(key, bytes(wrong), "a", 1)
    for k, context in ((b"1" * 32, ("a", 1)), (key, ("a", 2)), (key, ("b", 1))):
        with pytest.raises(ValueError, match="do not fit"):
            keys.unseal(k, sealed, *context)


def test_signatures():
    private = keys.entropy(32)
    signature = keys.sign(private, "a", 1)
    assert keys.verify(keys.identity_of(private), signature, "a", 1)
    assert not keys.verify(keys.identity_of(private), signature, "a", 2)
    assert not keys.verify(keys.identity_of(keys.entropy(32)), signature, "a", 1)
    assert not keys.verify(bytes(3), signature, "a", 1)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("length", [0, 1, 7, 32768, 40001])
def test_a_mask_is_the_keystream_of_the_vectors_in_turn(dtype, length):
    key = keys.entropy(32)
    head, body = np.arange(3, dtype=np.uint64), np.arange(length, dtype=dtype)
    vectors = head.copy(), body.copy()
    masks.add(vectors, key)
    total = head.nbytes + body.nbytes
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(total))
    assert (vectors[0] == head + np.frombuffer(stream[: head.nbytes], "<u8")).all()
    assert (vectors[1] == body + np.frombuffer(stream[head.nbytes :], np.dtype(dtype).newbyteorder("<"))).all()
    masks.add(vectors, key, negative=True)
    assert (vectors[0] == head).all()
    assert (vectors[1] == body).all()


@given(st.integers(2, 7), st.sampled_from([np.uint32, np.uint64]), st.integers(0, 2**32))
@settings(max_examples=30)
def test_pairwise_masks_cancel_in_the_sum(n, dtype, seed):
    rng = np.random.default_rng(seed)
    plain = [rng.integers(0, 2**32, 50).astype(dtype) for _ in range(n)]
    sent = [v.copy() for v in plain]
    for i, j in itertools.combinations(range(n), 2):
        key = keys.entropy(32)
        masks.add([sent[i]], key)
        masks.add([sent[j]], key, negative=True)
    assert (sum(sent) == sum(plain)).all()
    assert all((s != p).any() for s, p in zip(sent, plain, strict=True))


# --- fixed-point numbers ---------------------------------------------------------------------------------------------


@given(
    st.sampled_from([32, 64]),
    st.floats(1e-6, 1e9),
    st.integers(1, 1000),
    st.lists(st.floats(-1, 1), min_size=1, max_size=20),
)
def test_a_sum_is_within_the_bound(bits, bound, terms, shares):
    """The exact sum by fractions, for m <= terms equal and unequal numbers up to the bound."""
    code = FixedPoint(bits, bound, terms)
    numbers = [np.array([share * bound, bound, -bound]) for share in shares][:terms]
    total = sum(code.encode(x) for x in numbers)
    decoded = code.decode(total)
    for at in range(3):
        exact = sum(Fraction(x[at]) for x in numbers)
        rounding = sum(abs(Fraction(x[at])) for x in numbers) / 2**52
        assert abs(Fraction(decoded[at]) - exact) <= len(numbers) * Fraction(code.step) / 2 + rounding


@given(st.sampled_from([32, 64]), st.floats(1e-9, 1e12), st.integers(1, 10**6))
def test_no_sum_overflows_and_no_smaller_step_would_do(bits, bound, terms):
    code = FixedPoint(bits, bound, terms)
    scale = Fraction(2) ** code.shift
    largest = lambda scale: terms * (Fraction(bound) * scale + Fraction(1, 2))  # noqa: E731
    assert largest(scale) <= 2 ** (bits - 1) - 1 < largest(2 * scale)
    assert code.step == 2.0**-code.shift


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1.0000001, -2.0])
def test_values_above_the_bound_are_refused(value):
    with pytest.raises(ValueError, match=r"above 1"):
        FixedPoint(32, 1.0, 3).encode(np.array([0.5, value, 0.0]))


def test_a_factor_and_many_blocks():
    x = np.linspace(-1, 1, 100_003, dtype=np.float32)
    code = FixedPoint(32, 50.0, 2)
    found = code.decode(code.encode(x, 50.0))
    assert np.abs(found - 50.0 * x.astype(np.float64)).max() <= code.step / 2
    assert FixedPoint(64, 1e9, 1000).decode(FixedPoint(64, 1e9, 1000).encode(np.array([123456789.0]))) == [123456789.0]
