"""A client's first message: evaluation keys with a tag, for the ring that the server names."""

import pytest

from fedfm.core.client import Client, ClientData
from fedfm.core.rows import Rows
from fedfm.errors import ClientFault
from fedfm.privacy.crypto import keys

pytest.importorskip("tenseal.sealapi", reason='TenSEAL is absent: pip install "fedfm[encrypted]"')

from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.serialization import of_bytes, to_bytes
from fedfm.encrypted.protocol.client_sessions import Sessions, keys_channel
from fedfm.training.scheduler import train_client

SERVER, CLIENT, RUN = b"s" * 32, b"c" * 32, "0a" * 16


def client():
    return Client("c", ClientData(Rows, Rows, Rows), None, {}, 0, secret=lambda name: CLIENT, trainer=train_client)


@pytest.fixture(scope="module")
def sent():
    key, message = Sessions().open(client(), RUN, 4, 8192, of_bytes(keys.public_of(SERVER)))
    return to_bytes(key), to_bytes(message)


def opened(key, message, run=RUN, own=SERVER, ring=8192):
    return keys_channel(own, key, run, ring, "server").unpack_keys(message)


def test_evaluation_keys_arrive_with_their_tag(sent):
    parameters, tokens, _ = messages.parse_header(messages.PUBLIC, opened(*sent))
    assert (parameters.degree, tokens) == (8192, 4)


@pytest.mark.parametrize("place", [40, 1000, -1])
def test_altered_keys_are_refused(sent, place):
    key, message = sent
    altered = bytearray(message)
    altered[place] ^= 1
    with pytest.raises(ClientFault):
        opened(key, bytes(altered))
    with pytest.raises(ClientFault):
        opened(key, message[:-1])


def test_keys_of_another_run_ring_or_pair_are_refused(sent):
    key, message = sent
    for other in (
        lambda: opened(key, message, run="0b" * 16),
        lambda: opened(key, message, ring=16384),
        lambda: opened(key, message, own=b"t" * 32),
        lambda: opened(keys.public_of(b"d" * 32), message),
        lambda: opened(bytes(32), message),  # with a point of small order everybody knows the key
    ):
        with pytest.raises(ClientFault):
            other()


def test_a_ring_that_nobody_has_is_refused():
    with pytest.raises(ClientFault, match="degree 4096"):
        Sessions().open(client(), RUN, 4, 4096, of_bytes(keys.public_of(SERVER)))
