"""Key switching, rescaling and transforms of our own against SEAL's, against numpy, and against definitions."""

import struct

import numpy as np
import pytest

from fedfm.encrypted.ckks import noise_kernels
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts, products
from fedfm.encrypted.ckks.inner_products import inner, outer
from fedfm.encrypted.ckks.ring import Parameters, Ring
from fedfm.errors import InputError
from fedfm.linalg.kernels.jit import compile_cached
from fedfm.linalg.kernels.vectors import transpose8

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from tenseal import sealapi

from fedfm.encrypted.ckks import encoding, seal

PARAMETERS = Parameters()
CLIENT = seal.ClientKeys(PARAMETERS)
PUBLIC = CLIENT.public([1, 7, -7])
SERVER = seal.ServerKeys(PARAMETERS, PUBLIC)
X = np.random.default_rng(0).normal(size=(6, PARAMETERS.slots))
EX = Ciphertexts(CLIENT.encrypt(X).view(np.uint64), PARAMETERS.scale, SERVER)


def seals_keys():
    """SEAL's own objects, from the bytes that the server got."""
    at, library = struct.calcsize(seal._KEYS), SERVER._library
    public, relinearisation, _ = struct.unpack_from(seal._KEYS, PUBLIC)[1:]
    made = sealapi.RelinKeys(), sealapi.GaloisKeys()
    seal.load(made[0], PUBLIC[at + public : at + public + relinearisation], library.context)
    seal.load(made[1], PUBLIC[at + public + relinearisation :], library.context)
    return made


RELINEARISATION, GALOIS = seals_keys()


def by_seal(residues, apply):
    library = SERVER._library
    out = []
    for one in residues:
        target = library.empty()
        apply(library._from_stream(one, 2.0), target)
        out.append(library.read(target))
    return np.stack(out)


@pytest.mark.parametrize("limbs", [2, 3, 4, 5])
def test_relinearisation_and_rescaling_are_seals_bit_for_bit(limbs):
    rng, evaluator = np.random.default_rng(limbs), SERVER._library.evaluator
    residues = np.stack([rng.integers(0, q, (2, 3, 8192)) for q in PARAMETERS.primes[:limbs]], axis=2)
    residues[0, :, :, :4], residues[0, :, :, 4:8] = 0, np.array(PARAMETERS.primes[:limbs])[:, None] - 1
    x = Ciphertexts(residues.view(np.uint64), 2.0**40, SERVER)
    two = SERVER.relinearise(x)
    assert np.array_equal(two.residues, by_seal(residues, lambda a, b: evaluator.relinearize(a, RELINEARISATION, b)))
    want = by_seal(two.residues, evaluator.rescale_to_next)
    assert np.array_equal(SERVER.rescale(two).residues, want)
    both = SERVER.relinearise_and_rescale(x)
    assert np.array_equal(both.residues, want)
    assert both.scale == SERVER.rescale(two).scale


@pytest.mark.parametrize("limbs", [1, 3, 5])
def test_rotations_are_as_good_as_seals(limbs):
    x, evaluator = EX.at(limbs), SERVER._library.evaluator
    steps = [7, 0, 1, -7]
    both = SERVER.rotations(x, steps)
    for number, step in enumerate(steps):
        part = both[number * len(X) : (number + 1) * len(X)]
        assert np.array_equal(part.residues, x.rotate(step).residues), "a rotation depends on those of the same call"
        off = np.abs(CLIENT.decrypt(part.residues, part.scale) - np.roll(X, -step, axis=1)).std()
        if step:
            theirs = by_seal(x.residues, lambda a, b, s=step: evaluator.rotate_vector(a, s, GALOIS, b))
            assert off < 1.2 * np.abs(CLIENT.decrypt(theirs, x.scale) - np.roll(X, -step, axis=1)).std()
    with pytest.raises(InputError, match="no key for a rotation by 3 slots"):
        EX.rotate(3)


@pytest.mark.parametrize(("first", "last"), [(True, True), (True, False), (False, True), (False, False)])
def test_products_of_pairs_are_sums_of_products(first, last):
    a, b = EX, EX[[3, 1, 4, 0, 2, 5, 1, 1]].at(3)
    got = outer(a, b, 2, first=first, last=last)
    assert got.limbs.shape == (12, 3, 3, 8192)
    for i in range(3):
        for j in range(4):
            row = a[[2 * i, 2 * i + 1] if first else [i, 3 + i]]
            column = b[[2 * j, 2 * j + 1] if last else [j, 4 + j]]
            assert np.array_equal(got.residues[4 * i + j], inner(row, column).residues[0])
    assert got.scale == products(a[:1], b[:1]).scale
    with pytest.raises(InputError, match="rows of 4"):
        outer(a, b, 4)


@pytest.mark.parametrize(("degree", "bits"), [(4096, (36, 36)), (16384, (46, 20))])
def test_transforms_are_values_at_the_roots_in_bit_reversed_order(degree, bits):
    ring = Ring(Parameters(degree, bits, max(bits), 20))
    x = np.stack([np.random.default_rng(1).integers(0, q, (3, degree)) for q in ring.primes], axis=1)
    found = ring.forward(x.copy())
    assert np.array_equal(ring.backward(found.copy()), x)
    width = degree.bit_length() - 1
    for limb, q in enumerate(map(int, ring.primes)):
        least = int(ring.roots[0][limb, degree // 2])  # entry N / 2 is the root itself
        assert pow(least, degree, q) == q - 1
        for i in (0, 1, 5, degree - 1):
            z = pow(least, 2 * int(f"{i:0{width}b}"[::-1], 2) + 1, q)
            value = 0
            for c in x[0, limb][::-1].tolist():
                value = (value * z + c) % q
            assert found[0, limb, i] == value


def test_blocks_of_eight_are_transposed():
    def transpose(source, target):
        transpose8(source, 3, 16, target, 5, 10)

    source, target = np.arange(200), np.full(100, -1)
    compile_cached(transpose)(source, target)
    rows = np.stack([source[3 + 16 * k : 11 + 16 * k] for k in range(8)])
    assert np.array_equal(np.stack([target[5 + 10 * k : 13 + 10 * k] for k in range(8)]), rows.T)
    assert (target == -1).sum() == 36


def test_small_numbers_are_those_of_their_words():
    words = np.random.default_rng(2).integers(0, 2**64, (4, 4096), dtype=np.uint64)
    words[0, :4] = 0, 2**64 - 1, 3, 2**32
    out = np.empty((4, 4096), np.int64)
    noise_kernels.ternary(words, out)
    assert np.array_equal(out, (words % np.uint64(3)).astype(np.int64) - 1)
    noise_kernels.errors(words, out)
    mask = np.uint64(2**21 - 1)
    plus, minus = (np.bitwise_count(w & mask).astype(np.int64) for w in (words, words >> np.uint64(21)))
    assert np.array_equal(out, plus - minus)


def test_public_encryptions_hold_what_is_added():
    plain = np.random.default_rng(3).integers(-(2**40), 2**40, (9, 8192))
    made = SERVER.zeros(9, 3, encoding.modulo(plain, 3, SERVER.ring))
    off = encoding.to_coefficients(CLIENT.decrypt_polynomials(made), CLIENT.ring) - plain
    assert 200 < off.std() < 500
