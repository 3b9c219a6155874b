"""The refresh between two processes: what the server asks, and what the client answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import encoding, zero_encryptions
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.refresh import Masking, renew
from fedfm.encrypted.ckks.seal import ClientKeys
from fedfm.encrypted.ckks.wire import Channel
from fedfm.privacy.crypto import keys


class RemoteRefresh:
    """The server's side, to be an evaluator's ``refresh``.

    Args:
        masking: with the bound of the values and the client's ledger.
        channel: to the client, as sender "server".
        exchange: carries a message to the client and brings its answer.

    Attributes:
        messages, bytes_down, bytes_up: so far; down is to the client.
    """

    def __init__(self, masking: Masking, channel: Channel, exchange: Callable[[bytes], bytes]) -> None:
        self.masking, self._channel, self._exchange = masking, channel, exchange
        self.messages = self.bytes_down = self.bytes_up = 0

    def __call__(self, x: Ciphertexts) -> Ciphertexts:
        """Fresh ciphertexts of the same numbers.

        Raises:
            RunError: the masks' statistical distance is spent.
            ClientFault: the answer is not what was asked for.
        """
        hidden, mask = self.masking.hide(x)
        asked = self._channel.pack(hidden.residues, x.scale)
        answer = self._exchange(asked)
        limbs = x.evaluator.ring.parameters.limbs
        residues, scale = self._channel.unpack(answer, limbs=limbs, count=len(x), scale=x.scale)
        self.messages += 1
        self.bytes_down += len(asked)
        self.bytes_up += len(answer)
        return self.masking.reveal(Ciphertexts(residues.view(np.uint64), scale, x.evaluator), mask)


def answer_refresh(client: ClientKeys, channel: Channel, message: bytes, limbs: int) -> bytes:
    """The client's side of one refresh: renewed ciphertexts, with a seed in place of their second polynomials.

    Args:
        limbs: primes of what the server sends, agreed on before.

    Raises:
        ClientFault: the message is not what was agreed on.
    """
    residues, scale = channel.unpack(message, limbs=limbs)
    seed = keys.entropy(keys.KEY)
    second = zero_encryptions.uniform(seed, len(residues), client.parameters.limbs, client.parameters)
    return channel.pack(renew(client, residues, second), scale, seed)


def encrypt_message(
    client: ClientKeys, channel: Channel, values: NDArray[np.floating[Any]], limbs: int | None = None
) -> bytes:
    """Real slots (count, N / 2), encrypted with so many primes (None: all), as the client's next message."""
    parameters = client.parameters
    limbs = parameters.limbs if limbs is None else limbs
    plain = encoding.encode(np.asarray(values, np.float64), parameters.scale, parameters.degree)
    seed = keys.entropy(keys.KEY)
    second = zero_encryptions.uniform(seed, len(plain), limbs, parameters)
    residues = client.encrypt_polynomials(encoding.modulo(plain, limbs, client.ring), second)
    return channel.pack(residues, parameters.scale, seed)
