"""Messages with ciphertexts: they are decoded unchanged, and all others are refused before use (gate K7)."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedfm.encrypted.ckks import modular_kernels, zero_encryptions
from fedfm.encrypted.ckks.ring import SLOW_LINK, Parameters
from fedfm.encrypted.ckks.wire import _HEADER, Channel
from fedfm.errors import ClientFault, InputError

PARAMETERS = Parameters()
KEY, SESSION = bytes(range(32)), b"a session's name"
PRIMES = np.array(PARAMETERS.primes[:2])[:, None]
RESIDUES = np.random.default_rng(0).integers(0, PRIMES, (2, 2, 2, PARAMETERS.degree))
SCALE = PARAMETERS.scale


def client(**changes):
    return Channel(**({"parameters": PARAMETERS, "key": KEY, "session": SESSION, "sender": "client"} | changes))


def server(**changes):
    return client(**({"sender": "server"} | changes))


def received(data, channel=None, limbs=2, count=2, scale=SCALE):
    return (channel or server()).unpack(data, limbs=limbs, count=count, scale=scale)


MESSAGE = client().pack(RESIDUES, SCALE)


def test_messages_arrive_in_order_both_ways():
    here, there = client(), server()
    for _ in range(2):
        residues, scale = there.unpack(here.pack(RESIDUES, SCALE), limbs=2)
        assert np.array_equal(residues, RESIDUES)
        assert scale == SCALE
        assert np.array_equal(here.unpack(there.pack(RESIDUES[:1], 2.5), limbs=2)[0], RESIDUES[:1])


def test_residues_take_the_bits_of_their_primes():
    assert len(MESSAGE) == _HEADER.size + 32 + 2 * 2 * (43 + 36) * 8192 // 8


def test_a_seed_halves_a_message():
    seed = bytes(reversed(range(32)))
    residues = RESIDUES.copy()
    residues[:, 1] = zero_encryptions.uniform(seed, 2, 2, PARAMETERS)
    message = client().pack(residues, SCALE, seed)
    assert len(message) < 0.51 * len(MESSAGE)
    assert np.array_equal(received(message)[0], residues)


def test_seeded_polynomials_are_uniform_and_distinct():
    primes = np.array(PARAMETERS.primes[:5])[:, None]
    made = zero_encryptions.uniform(KEY, 4, 5, PARAMETERS)
    assert ((made >= 0) & (made < primes)).all()
    assert np.abs((made / primes).mean(axis=-1) - 0.5).max() < 5 / np.sqrt(12 * 8192)
    assert len({made[i, limb].tobytes() for i in range(4) for limb in range(5)}) == 20
    assert not np.array_equal(made, zero_encryptions.uniform(bytes(32), 4, 5, PARAMETERS))


@given(st.lists(st.integers(20, 49), min_size=1, max_size=6), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_packing_against_integers(bits, seed):
    rng = np.random.default_rng(seed)
    x = np.stack([rng.integers(0, 2**b, 64) for b in bits])
    x[0, :2] = 0, 2 ** bits[0] - 1
    words = np.empty(sum(bits), np.uint64)  # 64 numbers of b bits are b words
    modular_kernels.pack(x, np.array(bits), words)
    whole, at = 0, 0
    for row, b in zip(x.tolist(), bits, strict=True):
        for v in row:
            whole |= v << at
            at += b
    assert int.from_bytes(words.tobytes(), "little") == whole
    back = np.empty_like(x)
    modular_kernels.unpack(words, np.array(bits), back)
    assert np.array_equal(back, x)


# --- gate K7 ---------------------------------------------------------------------------------------------------------


@pytest.mark.proof
def test_ten_thousand_bit_flips_are_found():
    """All bits of header and tag, and bits of the content drawn at random."""
    rng = np.random.default_rng(1)
    ends = [*range(8 * _HEADER.size), *range(8 * (len(MESSAGE) - 32), 8 * len(MESSAGE))]
    inside = rng.integers(8 * _HEADER.size, 8 * (len(MESSAGE) - 32), 10_000 - len(ends))
    there, message = server(), bytearray(client().pack(RESIDUES[:1], SCALE))
    inside %= 8 * len(message)
    for bit in [*(b % (8 * len(message)) for b in ends), *inside]:
        message[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ClientFault):
            there.unpack(bytes(message), limbs=2)
        message[bit // 8] ^= 1 << bit % 8
    assert np.array_equal(there.unpack(bytes(message), limbs=2)[0], RESIDUES[:1])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "E_SIZE"),
        (MESSAGE[: _HEADER.size], "E_SIZE"),
        (MESSAGE[:-1], "E_FORMAT"),
        (MESSAGE[1:], "E_FORMAT"),
        (MESSAGE + b"\0", "E_FORMAT"),
        (MESSAGE + MESSAGE, "E_FORMAT"),
        (bytes(len(MESSAGE)), "E_FORMAT"),
        (MESSAGE[:4] + b"\1" + MESSAGE[5:], "E_VERSION"),
    ],
)
def test_damaged_messages_are_refused(data, code):
    with pytest.raises(ClientFault) as fault:
        received(data)
    assert fault.value.code == code


@pytest.mark.parametrize(
    ("channel", "code"),
    [
        (lambda: server(key=bytes(32)), "E_FORMAT"),
        (lambda: server(session=b"another session."), "E_ROUND"),
        (lambda: client(), "E_ROUND"),  # one's own message comes back
        (lambda: server(parameters=SLOW_LINK), "E_VERSION"),
        (lambda: server(parameters=Parameters(scale_bits=35)), "E_VERSION"),
    ],
)
def test_another_key_session_or_context_is_refused(channel, code):
    with pytest.raises(ClientFault) as fault:
        received(MESSAGE, channel())
    assert fault.value.code == code


@pytest.mark.parametrize("expected", [{"limbs": 3}, {"limbs": 1}, {"count": 3}, {"count": 1}, {"scale": 2.0**35}])
def test_another_level_count_or_scale_is_refused(expected):
    with pytest.raises(ClientFault) as fault:
        received(MESSAGE, **expected)
    assert fault.value.code == "E_SHAPE"


def test_replayed_and_reordered_messages_are_refused():
    here, there = client(), server()
    first, second = here.pack(RESIDUES, SCALE), here.pack(RESIDUES, SCALE)
    with pytest.raises(ClientFault, match="message 2 came, 1 was expected"):
        received(second, there)
    received(first, there)
    with pytest.raises(ClientFault, match="message 1 came, 2 was expected"):
        received(first, there)
    received(second, there)


def test_faulty_ciphertexts_with_a_right_tag_are_refused():
    """A tag is right, but the message has no residues, no key, a scale that is not a number, or no ciphertexts."""
    large, plain = RESIDUES.copy(), RESIDUES.copy()
    large[1, 0, 1, 77] = PRIMES[1, 0]
    plain[1, 1] = 0
    with pytest.raises(ClientFault, match="not below its prime"):
        received(client().pack(large, SCALE))
    with pytest.raises(ClientFault, match="readable without a key"):
        received(client().pack(plain, SCALE))
    for scale in (float("nan"), float("inf"), 0.5, -1.0, 2.0**200):
        with pytest.raises(ClientFault, match="scale"):
            received(client().pack(RESIDUES, scale), scale=None)
    with pytest.raises(InputError, match="cannot be a message"):
        client().pack(RESIDUES[:0], SCALE)
    with pytest.raises(ClientFault, match="0 ciphertexts came"):
        received(client()._seal(0, 0, 2, SCALE, bytes(32), b""), count=None)
    with pytest.raises(ClientFault, match="cannot have"):
        received(client()._seal(0, 2, 2, SCALE, bytes(32), MESSAGE[_HEADER.size : -40]))
    with pytest.raises(ClientFault, match="unknown kind"):
        received(client()._seal(9, 2, 2, SCALE, bytes(32), MESSAGE[_HEADER.size : -32]))
    with pytest.raises(ClientFault, match="1 to 5 were expected"):
        received(client().pack(np.repeat(RESIDUES[:1], 6, axis=0), SCALE), server(most=5), count=None)


def test_keys_and_ciphertexts_are_not_mistaken_for_each_other():
    here, there = client(), server()
    assert there.unpack_keys(here.pack_keys(b"keys")) == b"keys"
    with pytest.raises(ClientFault, match="keys came"):
        there.unpack(here.pack_keys(b"keys"), limbs=1)
    here, there = client(), server()
    with pytest.raises(ClientFault, match="but keys were expected"):
        there.unpack_keys(here.pack(RESIDUES, SCALE))
    with pytest.raises(ClientFault):
        there.unpack_keys(b"")


def test_a_refused_message_leaves_the_session_usable():
    here, there = client(), server()
    message = here.pack(RESIDUES, SCALE)
    for _ in range(3):
        with pytest.raises(ClientFault):
            received(message[:-5] + struct.pack("<5B", *range(5)), there)
    received(message, there)


def test_sessions_need_a_key_and_a_name():
    with pytest.raises(InputError, match="32 bytes"):
        client(key=b"short")
    with pytest.raises(InputError, match="16 bytes"):
        client(session=b"")
