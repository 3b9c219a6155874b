"""CKKS against numbers in the clear, against SEAL's own operations, and against exact whole-number arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.encrypted.ckks import encoding
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, concatenate, products, relinearise_and_rescale
from fedfm.encrypted.ckks.inner_products import inner, product_pairs, raw_square, reduce_for_product, square_again
from fedfm.encrypted.ckks.matrices import linear, matrix_product
from fedfm.encrypted.ckks.ring import SECURE_BITS, SLOW_LINK, Parameters
from fedfm.encrypted.student.polynomials import Inverse
from fedfm.errors import InputError

seal = pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import seal as ckks  # noqa: E402

PARAMETERS = Parameters()
CLIENT = ckks.ClientKeys(PARAMETERS)
SERVER = ckks.ServerKeys(PARAMETERS, CLIENT.public([1, 7, -7]))
RING = SERVER.ring


def numbers(count, seed=0, size=1.0):
    return np.random.default_rng(seed).normal(size=(count, PARAMETERS.slots)) * size


def encrypted(values):
    return Ciphertexts(CLIENT.encrypt(values).view(np.uint64), PARAMETERS.scale, SERVER)


class Squared(np.ndarray):
    """An array with a square."""

    def square(self):
        return self * self


def opened(x):
    return CLIENT.decrypt(x.residues, x.scale)


X, Y = numbers(4), numbers(4, 1)
EX, EY = encrypted(X), encrypted(Y)


# --- parameters ------------------------------------------------------------------------------------------------------


def test_the_security_table_is_seals():
    for degree, bits in SECURE_BITS.items():
        assert seal.CoeffModulus.MaxBitCount(degree, seal.SEC_LEVEL_TYPE.TC128) == bits


@pytest.mark.parametrize("parameters", [PARAMETERS, SLOW_LINK])
def test_the_primes_are_seals(parameters):
    bits = [*parameters.bits, parameters.special]
    assert [m.value() for m in seal.CoeffModulus.Create(parameters.degree, bits)] == list(parameters.primes)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bits": (43, 36, 36, 25, 36)}, "219 bits at degree 8192 give less than 128-bit security; at most 218"),
        ({"degree": 4096}, "at most 109"),
        ({"degree": 5000}, "degree 5000: expected one of"),
        ({"bits": (43,)}, "at least two"),
        ({"bits": (50, 36), "special": 60}, "20 to 46"),
        ({"special": 36}, "too small"),
    ],
)
def test_insecure_or_unusable_parameters_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        Parameters(**settings)


def test_parameters_that_seal_refuses_are_refused():
    """SEAL itself raises nothing: it has to be asked."""
    parameters = Parameters()
    parameters.__dict__["primes"] = (*parameters.primes[:-1], parameters.primes[-1] + 2)  # not prime
    with pytest.raises(InputError, match="SEAL refuses"):
        ckks.ClientKeys(parameters)


# --- the ring --------------------------------------------------------------------------------------------------------


def test_evaluation_form_multiplies_polynomials():
    """Compared with the schoolbook product modulo X^N + 1, of sparse polynomials."""
    rng = np.random.default_rng(2)
    n, q = RING.degree, [int(p) for p in RING.primes]
    a = {int(i): int(v) for i, v in zip(rng.integers(0, n, 5), rng.integers(-(2**40), 2**40, 5), strict=True)}
    b = {0: 3, n - 1: -(2**33) + 1, 77: 2**35 + 5}
    want = [[0] * n for _ in q]
    for i, x in a.items():
        for j, y in b.items():
            sign = -1 if i + j >= n else 1
            for row, p in zip(want, q, strict=True):
                row[(i + j) % n] = (row[(i + j) % n] + sign * x * y) % p
    both = np.zeros((2, len(q), n), np.int64)
    for which, sparse in enumerate((a, b)):
        for i, x in sparse.items():
            both[which, :, i] = [x % p for p in q]
    RING.forward(both)
    product = RING.dyadic(both[:1].copy(), both[1:].copy(), np.zeros_like(both[:1]))
    assert RING.backward(product)[0].tolist() == want


@given(st.integers(1, 4), st.integers(0, 2**32), st.booleans())
@settings(max_examples=12, deadline=None)
def test_halves_are_those_of_centred_integers(limbs, seed, edges):
    q = PARAMETERS.modulus(limbs)
    rng = np.random.default_rng(seed)
    whole = [int.from_bytes(rng.bytes(24), "little") % q - q // 2 for _ in range(64)]
    if edges:
        whole[:5] = [0, -1, q // 2, -(q // 2), 1]
    primes = [int(p) for p in RING.primes]
    x = np.zeros((1, limbs, RING.degree), np.int64)
    for row, p in zip(x[0], primes, strict=False):
        row[:64] = [v % p for v in whole]
    halves = RING.halves(x, 5)
    for row, p in zip(halves[0], primes[:5], strict=True):
        assert row[:64].tolist() == [v // 2 % p for v in whole]
        assert not row[64:].any()


@given(st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([1, -1]))
@settings(max_examples=12, deadline=None)
def test_pairs_are_complex_slots_and_come_apart(count, seed, sign):
    """Compared with the definition: X^(N/2) is i or -i in turn; a conjugation gives both parts, each exactly."""
    x = np.random.default_rng(seed).normal(size=(count, PARAMETERS.slots))
    plain = encoding.to_residues(encoding.encode(x, PARAMETERS.scale, 8192), 3, RING)
    pairs = RING.pair(plain, sign)
    half = (count + 1) // 2
    unit = sign * 1j ** (3 ** (np.arange(PARAMETERS.slots) % 2))
    want = x[:half].astype(complex)
    want[: count - half] += unit * x[half:]
    got = encoding.decode_complex(encoding.to_coefficients(pairs, RING), PARAMETERS.scale)
    np.testing.assert_allclose(got, want, atol=1e-6)
    again = RING.unpair(pairs, RING.pair(plain, -sign), count)
    want = plain.copy() if sign > 0 else np.concatenate([plain[:half], (-plain[half:]) % RING.primes[:3, None]])
    assert np.array_equal(again, RING.add(want, want))


def test_slots_are_values_of_the_polynomial():
    """Compared with the definition: slot j is m(zeta^(3^j))."""
    coefficients = np.random.default_rng(3).integers(-(2**30), 2**30, (1, 8192))
    slots = encoding.decode(coefficients, 2.0**20)
    for j in (0, 1, 2, 1000, 4095):
        root = np.exp(1j * np.pi / 8192 * ((pow(3, j, 16384) * np.arange(8192)) % 16384))
        assert slots[0, j] == pytest.approx((coefficients[0] * root).sum().real / 2**20, abs=1e-6)


def test_encoding_is_seals():
    encoder, plain = seal.CKKSEncoder(CLIENT._library.context), seal.Plaintext()
    encoder.encode(list(X[0]), CLIENT._library.ids[2], PARAMETERS.scale, plain)
    ours = encoding.to_residues(encoding.encode(X[:1], PARAMETERS.scale, 8192), 2, RING)
    theirs = np.array([plain[i] for i in range(2 * 8192)]).reshape(2, 8192)
    mine, other = RING.backward(ours.copy())[0], RING.backward(theirs[None].copy())[0]
    q = RING.primes[:2, None]
    assert np.abs((mine - other + q // 2) % q - q // 2).max() <= 1  # one unit: a coefficient halfway between two
    decoded = encoding.decode(encoding.to_coefficients(ours, RING), PARAMETERS.scale)[0]
    np.testing.assert_allclose(decoded, encoder.decode_double(plain), atol=1e-9)


# --- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "levels", "error"),
    [
        (lambda x, y: x + y, 0, 1e-7),
        (lambda x, y: x - y, 0, 1e-7),
        (lambda x, y: 1 - x, 0, 1e-7),
        (lambda x, y: -x, 0, 1e-7),
        (lambda x, y: 0.25 + x, 0, 1e-7),
        (lambda x, y: x * 3, 0, 1e-6),
        (lambda x, y: x * -0.37, 2, 2e-6),  # down to the narrow prime
        (lambda x, y: x * y, 1, 1e-5),
        (lambda x, y: x * y[:1], 1, 1e-5),
    ],
)
def test_arithmetic(compute, levels, error):
    got = compute(EX, EY)
    np.testing.assert_allclose(opened(got), compute(X, Y), atol=error)
    assert EX.level - got.level == levels


def test_squares_rotations_and_sums():
    np.testing.assert_allclose(opened(EX.square()), X**2, atol=1e-5)
    np.testing.assert_allclose(opened(EX.rotate(7)), np.roll(X, -7, axis=1), atol=1e-4)
    np.testing.assert_allclose(opened(EX.rotate(-7)), np.roll(X, 7, axis=1), atol=1e-4)
    assert EX.rotate(PARAMETERS.slots) is EX
    np.testing.assert_allclose(opened(EX[:3].total()), X[:3].sum(0, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(opened(relinearise_and_rescale(inner(EX, EY))), (X * Y).sum(0, keepdims=True), atol=1e-5)
    np.testing.assert_allclose(opened(concatenate([EX[:2], EY.at(4)[2:]])), np.vstack([X[:2], Y[2:]]), atol=1e-6)


@given(st.integers(1, 4), st.integers(0, 2**32))
@settings(max_examples=5, deadline=None)
def test_pairs_of_products_open_to_both_products(count, seed):
    """Compared with the slots; the unit is i or -i in turn, and an odd one out stays real."""
    which = np.random.default_rng(seed).integers(0, len(X), count).tolist()
    got = product_pairs(EX[:count], EY, which)
    want, half = X[:count] * Y[which], (count + 1) // 2
    pairs = want[:half].astype(complex)
    pairs[: count - half] += 1j ** (3 ** (np.arange(PARAMETERS.slots) % 2)) * want[half:]
    np.testing.assert_allclose(CLIENT.decrypt_complex(got.residues, got.scale), pairs, atol=1e-5)
    assert got.level == EX.level - 1


def with_client(asked):
    """Keys whose refresh the client computes here, without masks; ``asked`` gets the arrays before."""

    def refresh(x):
        asked.append(x)
        coefficients = CLIENT.ring.backward(CLIENT.decrypt_polynomials(x.residues))
        fresh = CLIENT.encrypt_polynomials(CLIENT.ring.halves(coefficients, PARAMETERS.limbs))
        return Ciphertexts(fresh.view(np.uint64), x.scale / 2, x.evaluator)

    return ckks.ServerKeys(PARAMETERS, CLIENT.public(), floor=3, refresh=refresh)


def test_squares_before_another_product_are_relinearised_as_pairs():
    keys, reduced = with_client(asked := []), []
    call = keys.relinearise_and_rescale
    keys.relinearise_and_rescale = lambda x: (reduced.append(len(x)), call(x))[1]
    x = Ciphertexts(EX.limbs[:3], EX.scale, keys)
    for computed in (square_again, lambda x: reduce_for_product(raw_square(x))):
        got = computed(x)
        np.testing.assert_allclose(opened(got), X[:3] ** 2, atol=1e-5)
        assert got.level == EX.level
    assert [len(sent) for sent in asked] == reduced == [2, 2]
    keys.floor = 1  # the square has a level for another one
    for computed in (square_again, lambda x: reduce_for_product(raw_square(x))):
        np.testing.assert_allclose(opened(computed(x)), X[:3] ** 2, atol=1e-5)
    assert len(asked) == 2
    assert reduced == [2, 2, 3, 3]
    with pytest.raises(InputError, match="2 factors for 3 ciphertexts"):
        product_pairs(x, x, [0, 1])


def test_a_wide_inverse_is_refreshed_with_less_noise_and_within_the_bound():
    """Compared with the polynomial in float64; without the lift the same steps have several times the error."""
    inverse = Inverse(18, (2e-5, 2.0), scale=0.9)
    u = np.geomspace(4e-5, 1.7, PARAMETERS.slots)[None] * 0.9
    want, errors = inverse.evaluate_folded(u.view(Squared)), []
    for lift in (inverse.lift, 1):
        keys = with_client(asked := [])
        x = Ciphertexts(CLIENT.encrypt(u).view(np.uint64), PARAMETERS.scale, keys).at(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inverse, "lift", lift)
            got = inverse.evaluate_folded(x)
        errors.append(np.sqrt(np.mean((opened(got) / np.asarray(want) - 1) ** 2)))
        for sent in asked:  # what a mask hides is the value times its scale
            most = np.abs(CLIENT.decrypt_complex(sent.residues, PARAMETERS.scale)).max()
            assert most < 1.01 * np.sqrt(2) * np.abs(want).max()
    assert lift == 1
    assert errors[0] < 1e-3
    assert errors[1] > 4 * errors[0]


def test_a_public_encryption_is_fresh_and_right():
    once, again = SERVER.encrypt(X), SERVER.encrypt(X)
    np.testing.assert_allclose(opened(once), X, atol=1e-5)
    assert not np.array_equal(once.limbs[:, 1], again.limbs[:, 1])


def test_the_tensor_product_is_seals_bit_for_bit():
    library = SERVER._library
    factors = [library._from_stream(c.residues[0], c.scale) for c in (EX, EY)]
    product = library.empty()
    library.evaluator.multiply(*factors, product)
    assert np.array_equal(library.read(product), products(EX[:1], EY[:1]).residues[0])


def test_three_polynomials_open_to_the_product():
    """Exactly, since decryption is a homomorphism: the product of what the factors open to."""
    x, y = CLIENT.decrypt_polynomials(EX.residues), CLIENT.decrypt_polynomials(EY.residues)
    product = CLIENT.decrypt_polynomials(products(EX, EY).residues)
    assert np.array_equal(product, RING.dyadic(x, y, np.zeros_like(x)))
    with pytest.raises(InputError, match="values exceed the modulus"):  # scale 2^72: coefficients beyond 2^62
        encoding.to_coefficients(product, RING)


def seal_loop(rounded, x, scale):
    """W x with SEAL's products by plaintexts, one by one."""
    library, s = SERVER._library, seal
    encoder, out = s.CKKSEncoder(library.context), []
    inputs = [library._from_stream(r, x.scale) for r in x.residues]
    for row in rounded:
        total = None
        for weight, ciphertext in zip(row, inputs, strict=True):
            if weight:
                plain, part = s.Plaintext(), library.empty()
                encoder.encode(float(weight) / scale, library.ids[x.level + 1], scale, plain)
                library.evaluator.multiply_plain(ciphertext, plain, part)
                total = part if total is None else total
                if part is not total:
                    library.evaluator.add_inplace(total, part)
        out.append(library.read(total))
    return np.stack(out)


def test_matrix_products_are_seals_bit_for_bit():
    rng = np.random.default_rng(5)
    scale = float(PARAMETERS.primes[3])
    rounded = np.rint(rng.normal(size=(3, 4)) * scale)
    rounded[1, 2] = 0
    x = EX.at(4)
    assert np.array_equal(matrix_product(rounded, x.residues, RING), seal_loop(rounded, x, scale))


@given(st.integers(0, 2**32), st.integers(1, 33), st.integers(1, 9))
@settings(max_examples=10, deadline=None)
def test_matrix_products_are_exact(seed, magnitude, rows):
    """Compared with Python's whole numbers, at the largest pieces: bits of W from 1 to 33."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(-(2**magnitude) + 1, 2**magnitude, (rows, 4)).astype(float)
    got = matrix_product(weight, EX.residues, RING)
    for limb, q in enumerate(PARAMETERS.primes[:5]):
        for place in (0, 4097, 8191):
            column = [int(v) for v in EX.residues[:, 1, limb, place]]
            want = [sum(int(w) * c for w, c in zip(row, column, strict=True)) % q for row in weight]
            assert got[:, 1, limb, place].tolist() == want


def test_linear_layers():
    rng = np.random.default_rng(6)
    weight, bias = rng.normal(size=(5, 4)), rng.normal(size=5)
    weight[3] = 0  # a row of zeros would be readable by everyone
    got = linear(weight, EX, bias)
    np.testing.assert_allclose(opened(got), weight @ X + bias[:, None], atol=3e-6)
    assert (got.level, got.scale) == (2, PARAMETERS.scale)
    assert got.limbs[3, 1].any()
    assert not got.transparent()
    assert Ciphertexts(np.zeros_like(EX.limbs[:1]), 1.0, SERVER).transparent()


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda: EX * 0, "is readable without a key"),
        (lambda: EX * float("nan"), "is readable without a key"),
        (lambda: EX + EX * Ciphertexts(EY.limbs, 2.0**30, SERVER), "in one sum"),
        (lambda: EX.at(1) * EY, "no client can refresh values"),
        (lambda: EX.at(2).at(3), "refresh the ciphertexts"),
        (lambda: EX.rotate(3), "no key for a rotation"),
        (lambda: EX[:2] + EX[:3], "expected equally many"),
        (lambda: products(EX, EY) + EX.at(5), "in one sum|not relinearised"),
        (lambda: linear(np.ones((2, 3)), EX), "a matrix"),
        (lambda: linear(np.full((2, 4), np.inf), EX), "not finite"),
        (lambda: CLIENT.encrypt(X * np.nan), "finite"),
        (lambda: CLIENT.encrypt(X * 1e12), "too large"),
        (lambda: CLIENT.encrypt(X[:, :5]), "expected"),
        (lambda: Ciphertexts(EX.limbs.astype(np.int64), 1.0, SERVER), "expected uint64"),
        (lambda: Ciphertexts(EX.limbs, 0.0, SERVER), "scale"),
        (lambda: ckks.ServerKeys(PARAMETERS, b""), "not public keys"),
        (lambda: ckks.ServerKeys(PARAMETERS, CLIENT.public()[:-1]), "not public keys"),
        (lambda: ckks.ServerKeys(SLOW_LINK, CLIENT.public()), "not public keys"),
        (lambda: ckks.ClientKeys(PARAMETERS, b"secret"), "not a secret key"),
    ],
)
def test_misuse_is_refused(compute, words):
    with pytest.raises(InputError, match=words):
        compute()


# --- keys ------------------------------------------------------------------------------------------------------------


def test_another_key_decrypts_nothing_and_a_kept_key_everything():
    other = ckks.ClientKeys(PARAMETERS)
    with pytest.raises(InputError, match="the key is wrong"):
        other.decrypt(EX.residues, EX.scale)
    kept = ckks.ClientKeys(PARAMETERS, CLIENT.secret)
    np.testing.assert_allclose(kept.decrypt(EX.residues, EX.scale), X, atol=1e-6)


def test_the_server_gets_no_secret_key():
    """Neither the stream of the secret key nor its numbers, of which 64 in a row would do."""
    public = CLIENT.public([1, 7])
    assert CLIENT.secret[16:80] not in public
    assert not hasattr(SERVER, "decrypt")
    assert CLIENT._key[0, :8].tobytes() not in public


def test_a_second_polynomial_of_ones_own_choice():
    """The receiver makes c1 from a seed: the ciphertext still opens to the same polynomial."""
    plain = encoding.modulo(encoding.encode(X[:1], PARAMETERS.scale, 8192), 5, RING)
    second = np.random.default_rng(8).integers(0, RING.primes[:5, None], (1, 5, 8192))
    residues = CLIENT.encrypt_polynomials(plain, second)
    assert np.array_equal(residues[:, 1], second)
    np.testing.assert_allclose(CLIENT.decrypt(residues, PARAMETERS.scale), X[:1], atol=1e-6)


def test_without_pointers_streams_give_the_same_residues(monkeypatch):
    assert SERVER._library.direct, "SEAL's memory is not where it is expected: keys take longer to load"
    monkeypatch.setattr(ckks, "_pointer_fits", lambda ciphertext: False)
    streams = ckks.ServerKeys(PARAMETERS, CLIENT.public())
    assert not streams._library.direct
    product = products(EX, EX)
    done = streams.relinearise_and_rescale(product)
    np.testing.assert_allclose(CLIENT.decrypt(done.residues, done.scale), X**2, atol=1e-5)
