"""The refresh between two processes: the request of the server and the answer of the client."""

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
    """The server's side of a refresh; an object of this class is an evaluator's ``refresh``.

    Args:
        masking: masks ciphertexts; it has the bound of the values and the client's ledger.
        channel: the channel to the client, with "server" as sender.
        exchange: sends a message to the client and returns its answer.

    Attributes:
        messages, bytes_down, bytes_up: totals so far; "down" means from the server to the client.
    """

    def __init__(self, masking: Masking, channel: Channel, exchange: Callable[[bytes], bytes]) -> None:
        self.masking, self._channel, self._exchange = masking, channel, exchange
        self.messages = self.bytes_down = self.bytes_up = 0

    def __call__(self, x: Ciphertexts) -> Ciphertexts:
        """Ask the client for fresh ciphertexts of the same values, at half the scale.

        Raises:
            RunError: the run would exceed its statistical distance.
            ClientFault: the answer does not fit the request.
        """
        hidden, mask = self.masking.hide(x)
        asked = self._channel.pack(hidden.residues, x.scale)
        answer = self._exchange(asked)
        limbs = x.evaluator.ring.parameters.limbs
        residues, scale = self._channel.unpack(answer, limbs=limbs, count=len(x), scale=x.scale / 2)
        self.messages += 1
        self.bytes_down += len(asked)
        self.bytes_up += len(answer)
        return self.masking.reveal(Ciphertexts(residues.view(np.uint64), scale, x.evaluator), mask)


def answer_refresh(client: ClientKeys, channel: Channel, message: bytes, limbs: int) -> bytes:
    """Answer one refresh at the client with fresh ciphertexts; a seed replaces their second polynomials.

    Args:
        limbs: the agreed number of primes in the server's message.

    Raises:
        ClientFault: the message does not have the agreed form.
    """
    residues, scale = channel.unpack(message, limbs=limbs)
    seed = keys.entropy(keys.KEY)
    second = zero_encryptions.uniform(seed, len(residues), client.parameters.limbs, client.parameters)
    return channel.pack(renew(client, residues, second), scale / 2, seed)


def encrypt_message(
    client: ClientKeys, channel: Channel, values: NDArray[np.floating[Any]], limbs: int | None = None
) -> bytes:
    """Encrypt real slots (count, N / 2) with ``limbs`` primes (None: all), as the client's next message."""
    parameters = client.parameters
    limbs = parameters.limbs if limbs is None else limbs
    plain = encoding.encode(np.asarray(values, np.float64), parameters.scale, parameters.degree)
    seed = keys.entropy(keys.KEY)
    second = zero_encryptions.uniform(seed, len(plain), limbs, parameters)
    residues = client.encrypt_polynomials(encoding.modulo(plain, limbs, client.ring), second)
    return channel.pack(residues, parameters.scale, seed)
