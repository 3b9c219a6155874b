"""Secret orders of samples under encryption, against orders by NumPy."""

import numpy as np
import pytest

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.ring import SLOW_LINK, Parameters
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.errors import InputError

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import seal, slot_permutation

P = Parameters()
LAYOUT = Packing(P, 16)
CLIENT = seal.ClientKeys(P)
SERVER = seal.ServerKeys(P, CLIENT.public(slot_permutation.rotations(LAYOUT)))
SCALE = P.scale / 4 * P.primes[1] / P.scale  # of masks, so that a quarter of the first prime is left for the numbers


def routed(x, order, features):
    encrypted = Ciphertexts(CLIENT.encrypt(LAYOUT.pack(x)).view(np.uint64), P.scale, SERVER).at(2)
    plains = slot_permutation.masks(order, LAYOUT, 2, SCALE, SERVER.ring)
    pairs = slot_permutation.pair_features(encrypted)
    assert len(pairs) == -(-features // 2)
    out = SERVER.rescale(
        slot_permutation.permute_samples(pairs, len(order), LAYOUT, slot_permutation.weighing(plains, SCALE, SERVER))
    )
    assert out.limbs.shape[1:3] == (2, 1)
    return slot_permutation.unpair_features(CLIENT.decrypt_complex(out.residues, out.scale), features)


@pytest.mark.parametrize("n", [2, 17, 256])
def test_only_samples_of_the_order_are_in_the_result(n):
    rng = np.random.default_rng(n)
    x, order = rng.normal(size=(n, 16, 3)), rng.permutation(n)
    slots = routed(x, order, 3)
    np.testing.assert_allclose(LAYOUT.unpack(slots, n), x[order], atol=1e-4)
    assert np.abs(slots.reshape(3, 16, -1)[:, :, n:]).max(initial=0) < 1e-4


@pytest.mark.parametrize("order", [np.arange(256), np.arange(256)[::-1], np.roll(np.arange(256), 1)])
def test_orders_with_the_largest_shifts(order):
    x = np.random.default_rng(0).normal(size=(256, 16, 1))
    np.testing.assert_allclose(LAYOUT.unpack(routed(x, order, 1), 256), x[order], atol=1e-4)


def test_the_operations_do_not_depend_on_the_order(monkeypatch):
    found, turn = [], SERVER.rotations
    monkeypatch.setattr(SERVER, "rotations", lambda x, steps: found.append((len(x), steps)) or turn(x, steps))
    x = np.ones((20, 16, 1))
    routed(x, np.arange(20), 1)
    first = found.copy()
    found.clear()
    routed(x, np.random.default_rng(0).permutation(20), 1)
    assert found == first
    assert len(found) == 15 + 1 + 2  # baby steps, giant steps 1, -1 and -2


@pytest.mark.parametrize("layout", [Packing(P, 4), Packing(SLOW_LINK, 16), Packing(P, 4096)])
def test_shifts_are_covered_once_with_at_most_three_keys(layout):
    b = slot_permutation.baby(layout)
    for n in {1, 2, b, layout.samples} & set(range(layout.samples + 1)):
        shifts = [g * b + i for g in slot_permutation.giants(n, layout) for i in range(b)]
        assert sorted(set(shifts)) == shifts
        assert set(range(1 - n, n)) <= set(shifts)
    assert len(slot_permutation.rotations(layout)) <= 3


@pytest.mark.parametrize("order", [[0, 0], [1, 2], [[0, 1]], range(257)])
def test_invalid_orders_are_refused(order):
    with pytest.raises(InputError, match="names every sample once"):
        slot_permutation.masks(np.array(order), LAYOUT, 2, SCALE, SERVER.ring)
