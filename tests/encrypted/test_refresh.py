"""Masked refresh: exact whole numbers, the distance formula against a count, what the client sees."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import PAIRED, DistanceLedger, Mask, Masking, distance, least_limbs, mask_bits, renew
from fedfm.encrypted.ckks.ring import SLOW_LINK, Parameters
from fedfm.errors import InputError, RunError

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.ckks import seal

PARAMETERS = Parameters()
CLIENT = seal.ClientKeys(PARAMETERS)
SERVER = seal.ServerKeys(PARAMETERS, CLIENT.public())
RING = SERVER.ring
X = np.random.default_rng(0).normal(size=(3, PARAMETERS.slots))


def spent(limbs=3):
    return Ciphertexts(CLIENT.encrypt(X).view(np.uint64), PARAMETERS.scale, SERVER).at(limbs)


def integers(residues):
    """Centred coefficients as Python's whole numbers, by the Chinese remainder theorem."""
    primes = [int(q) for q in RING.primes[: residues.shape[0]]]
    modulus = math.prod(primes)
    parts = [modulus // q * pow(modulus // q, -1, q) for q in primes]
    rows = RING.backward(residues[None].copy())[0].tolist()
    values = [sum(p * v for p, v in zip(parts, column, strict=True)) % modulus for column in zip(*rows, strict=True)]
    return [v - modulus if v > modulus // 2 else v for v in values]


def test_a_refresh_gives_half_of_the_integers_with_all_primes():
    x = spent()
    masking = Masking(8.0)
    hidden, mask = masking.hide(x)
    answer = Ciphertexts(renew(CLIENT, hidden.residues).view(np.uint64), x.scale / 2, SERVER)
    fresh = masking.reveal(Ciphertexts(answer.limbs.copy(), answer.scale, SERVER), mask)
    assert fresh.level == 4
    np.testing.assert_allclose(CLIENT.decrypt(fresh.residues, fresh.scale), X, atol=1e-5)
    # Beyond the noise of the two encryptions at most one unit is lost.
    before = np.array(integers(CLIENT.decrypt_polynomials(x.residues)[0]))
    after = np.array(integers(CLIENT.decrypt_polynomials(fresh.residues)[0]))
    seen, shown = (
        integers(CLIENT.decrypt_polynomials(hidden.residues)[0]),
        integers(CLIENT.decrypt_polynomials(answer.residues)[0]),
    )
    fresh_noise = np.array([a - b // 2 for a, b in zip(shown, seen, strict=True)], np.int64)
    assert np.abs(fresh_noise).max() < 64  # one symmetric encryption: 3.2 * 6
    assert np.abs(2 * after - before).max() < 2**14


@pytest.mark.parametrize("count", [1, 2, 3])
def test_values_are_refreshed_in_pairs_and_keep_their_scale(count):
    asked = Asked()
    x = asked.holds(X[:count], 3)
    fresh = x.refresh()
    assert asked.counts == [(count + 1) // 2]
    assert (len(fresh), fresh.level, fresh.scale) == (count, 4, x.scale)
    np.testing.assert_allclose(CLIENT.decrypt(fresh.residues, fresh.scale), X[:count], atol=1e-5)


@given(st.integers(2, 114), st.integers(0, 2**32))
def test_half_of_a_mask_is_rounded_down(bits, seed):
    mask = Mask(np.random.default_rng(seed).bytes(32), bits, 1, 1.0)
    whole, half = (integers(RING.forward(mask.coefficients(0, 1, 5, RING, halved))[0]) for halved in (False, True))
    assert half == [v // 2 for v in whole]


def test_the_client_decrypts_uniform_values_that_differ_each_time():
    x = spent()
    bits = mask_bits(PARAMETERS, 3, x.scale, 8.0 * PAIRED)
    assert bits == 114
    views = []
    for _ in range(2):
        hidden, _ = Masking(8.0).hide(x)
        views.append(np.array(integers(CLIENT.decrypt_polynomials(hidden.residues)[0]), object))
        assert not np.array_equal(hidden.limbs[:, 1], x.limbs[:, 1])
    places = [(v / 2 ** (bits - 1)).astype(float) for v in views]
    for place in places:  # 8192 uniform numbers in (-1, 1): five standard errors
        assert abs(place.mean()) < 5 / math.sqrt(3 * 8192)
        assert abs((place**2).mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / 8192)
        assert np.abs(place).max() <= 1
    assert abs(np.corrcoef(*places)[0, 1]) < 5 / math.sqrt(8192)
    low = np.array([int(v) & 1 for v in views[0]])
    assert abs(low.mean() - 0.5) < 2.5 / math.sqrt(8192)  # the last bit is masked too


def test_an_answer_carries_nothing_of_the_weights():
    """Without the fresh zero the second polynomial of W x would be W times that of x, which the client knows."""
    x = spent()
    hidden, _ = Masking(8.0).hide(x * 3)
    expected = RING.affine(x.residues, RING.constant(3, 3), np.zeros(3, np.int64))
    assert np.array_equal((x * 3).residues[:, 1], expected[:, 1])
    assert (hidden.residues[:, 1] == expected[:, 1]).mean() < 1e-3


@given(st.integers(1, 40), st.integers(2, 60))
def test_the_distance_of_a_shifted_uniform_number(shift, size):
    """The formula of one coefficient, |v| / M, against a count."""
    mask = set(range(size))
    moved = {m + shift for m in mask}
    assert len(moved - mask) / size == min(shift / size, 1)


@given(st.integers(2, 4), st.floats(0.5, 1e3), st.integers(20, 40))
def test_the_distance_bounds_every_message(limbs, bound, scale_bits):
    """Compared with the sum of |v_j| / M, of a polynomial whose slots reach the bound, and no wrap-around."""
    from fedfm.encrypted.ckks import encoding

    scale = 2.0**scale_bits
    slots = np.sign(X[:1]) * bound
    v = np.abs(encoding.encode(slots, scale, PARAMETERS.degree)[0])
    bits = mask_bits(PARAMETERS, limbs, scale, bound)
    assert float(v.sum()) / 2.0**bits <= distance(PARAMETERS, limbs, scale, bound) * (1 + 1e-6)
    assert 2 ** (bits - 1) + int(v.max()) <= PARAMETERS.modulus(limbs) // 2 < 2**bits + math.ceil(bound * scale)


def test_two_primes_are_too_few_and_three_suffice():
    assert distance(PARAMETERS, 2, PARAMETERS.scale, 8.0) > 2.0**-33
    assert least_limbs(PARAMETERS, 10**6, 8.0) == 3
    assert least_limbs(SLOW_LINK, 10**6, 8.0) < 6
    with pytest.raises(InputError, match="larger modulus"):
        least_limbs(Parameters(8192, (43, 36, 36), 43, 36), 10**6, 8.0)


def test_the_ledger_adds_up_and_stops():
    ledger = DistanceLedger()
    masking = Masking(8.0, ledger)
    masking.hide(spent())
    each = distance(PARAMETERS, 3, PARAMETERS.scale, 8.0 * PAIRED)
    assert ledger.spent == pytest.approx(3 * each)
    shown = f"3 refreshed ciphertexts, statistical distance at most 2^{math.log2(3 * each):.1f}"
    assert str(ledger) == f"{shown}, as long as every value stays within the intervals of the model's polynomials"
    with pytest.raises(RunError, match="above 2\\^-40"):
        masking.hide(spent(2))
    assert ledger.ciphertexts == 3


def test_masks_serve_once_and_fit():
    masking = Masking(8.0)
    hidden, mask = masking.hide(spent())
    answer = Ciphertexts(renew(CLIENT, hidden.residues).view(np.uint64), hidden.scale / 2, SERVER)
    with pytest.raises(InputError, match="mask of 3"):
        masking.reveal(answer[:2], mask)
    masking.reveal(answer, mask)
    with pytest.raises(InputError, match="was used before"):
        masking.reveal(answer, mask)
    with pytest.raises(InputError, match="bound"):
        Masking(0.0)
    with pytest.raises(InputError, match="no room"):
        mask_bits(PARAMETERS, 2, 2.0**36, 2.0**50)
    assert repr(mask.key) not in repr(mask)


class Asked:
    """A server that keeps three primes and refreshes through a client, and what the client was asked."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.ledger = DistanceLedger()
        self.server = seal.ServerKeys(PARAMETERS, CLIENT.public(), floor=3, refresh=self._refresh)

    def _refresh(self, x):
        self.counts.append(len(x))
        masking = Masking(8.0, self.ledger)
        hidden, mask = masking.hide(x)
        answer = renew(CLIENT, hidden.residues).view(np.uint64)
        return masking.reveal(Ciphertexts(answer, x.scale / 2, self.server), mask)

    def holds(self, values, limbs, scale=1.0):
        fresh = CLIENT.encrypt(np.asarray(values)).view(np.uint64)
        return Ciphertexts(fresh, PARAMETERS.scale * scale, self.server).at(limbs)


def test_arrays_that_are_multiplied_next_are_renewed_in_one_message_and_keep_their_scales():
    asked = Asked()
    a, b, c = asked.holds(X, 3), asked.holds(X[:1], 4, 1 + 2.0**-12), asked.holds(X[:2], 5)
    a.renew_with(b, c, a)
    assert asked.counts == [2]  # pairs of a and b; c has all its levels
    assert [x.level for x in (a, b, c)] == [4, 4, 4]
    assert b.scale == PARAMETERS.scale * (1 + 2.0**-12)
    for got, want in ((a, X), (b, X[:1] / (1 + 2.0**-12)), (c, X[:2])):
        np.testing.assert_allclose(CLIENT.decrypt(got.residues, got.scale), want, atol=1e-5)
    c.at(5).renew_with(asked.holds(X, 5))
    assert asked.counts == [2]  # nothing was spent


@pytest.mark.parametrize("limbs", [4, 5])
def test_a_division_by_the_scale_costs_no_level_and_no_more_distance(limbs):
    asked = Asked()
    x = asked.holds(X, limbs).over(128.0)
    assert x.level == limbs - 1
    np.testing.assert_allclose(CLIENT.decrypt(x.residues, x.scale), X / 128, atol=1e-7)
    more = x * 2.5  # as many bits are left as a factor needs
    assert more.scale == pytest.approx(PARAMETERS.scale, rel=2.0**-10)
    np.testing.assert_allclose(CLIENT.decrypt(more.residues, more.scale), X / 128 * 2.5, atol=1e-5)
    assert asked.counts == []
    small = x * 0.01  # not here: refreshed first, at the usual scale, which the masks were planned for
    np.testing.assert_allclose(CLIENT.decrypt(small.residues, small.scale), X / 12800, atol=1e-5)
    if limbs == 4:
        assert asked.counts == [2]
        each = distance(PARAMETERS, 3, PARAMETERS.scale, 8.0 * PAIRED)
        assert asked.ledger.spent == pytest.approx(2 * each, rel=1e-3)
