"""The key holder's half of encrypted inference. The key holder has the rows, makes all keys, and decrypts."""

from __future__ import annotations

import math
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks.remote_refresh import answer_refresh, encrypt_message
from fedfm.encrypted.ckks.ring import Parameters
from fedfm.encrypted.ckks.seal import ClientKeys
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel, note_of, session_of
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.released_states import KINDS, Numbers, Released
from fedfm.errors import E_FORMAT, E_NONFINITE, E_NORM, E_ROUND, E_SHAPE, ClientFault, InputError
from fedfm.linalg.kernels import buffers


class OutOfRange(ClientFault):
    """Disclosed activations are larger than the model can produce."""


class KeyHolder:
    """The side with the rows. It makes all keys, encrypts, refreshes, and decrypts the disclosed activations.

    Several sessions may be open. Each message has its session's name in its header. A process that has lost its
    sessions answers with a ``ClientFault``, and the owner begins another session.

    Args:
        tokens: T, number of tokens of a sample.
        parameters: parameters of the encryption scheme.
        secret: the secret key of an earlier key holder; None to make a new key from the system's entropy.
    """

    def __init__(self, tokens: int, parameters: Parameters, secret: bytes | None = None) -> None:
        buffers.keep_all_freed()
        self._floor = messages.floor_of(parameters)
        self.layout, self._keys = Packing(parameters, tokens), ClientKeys(parameters, secret)
        self._channels: dict[bytes, Channel] = {}
        self._current: Channel | None = None

    @classmethod
    def new(cls, tokens: int, parameters: Parameters = messages.SETS[0]) -> Self:
        """Make a key holder with new keys.

        Raises:
            InputError: there are more tokens than slots.
        """
        return cls(tokens, parameters)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Load a key holder from the bytes of :meth:`to_bytes`.

        Raises:
            ClientFault, InputError: these bytes are not a saved key holder.
        """
        parameters, tokens, secret = messages.parse_header(messages.SECRET, data)
        return cls(tokens, parameters, secret)

    def to_bytes(self) -> bytes:
        """Serialise parameters, tokens and secret key, for the key holder's own storage. Never send these bytes."""
        return messages.make_header(messages.SECRET, self.layout.parameters, self.layout.tokens) + self._keys.secret

    def public(self) -> bytes:
        """Make evaluation keys, which are sent once. Every call makes different keys, which are all valid."""
        head = messages.make_header(messages.PUBLIC, self.layout.parameters, self.layout.tokens)
        return head + self._keys.public(self.rotations)

    @property
    def rotations(self) -> set[int]:
        """Rotation steps for which the key holder sends keys."""
        return self.layout.rotations

    def begin(self, session: bytes, key: bytes, counts: tuple[int, int] = (0, 0)) -> None:
        """Open the session with the name ``session`` (16 bytes). Both sides have agreed on ``key``.

        To continue a session that another process began, pass as ``counts`` what :meth:`counts` returned there.
        """
        channel = Channel(self.layout.parameters, key, session, "client")
        channel.sent, channel.received = counts
        self._channels[session] = self._current = channel

    def counts(self, session: bytes) -> tuple[int, int]:
        """Return the numbers of messages that this side has sent and received in a session."""
        channel = self._channel(session)
        return channel.sent, channel.received

    def end(self, session: bytes) -> None:
        """Close a session."""
        self._channels.pop(session, None)

    def rows(self, x: Numbers) -> bytes:
        """Encrypt rows (n, T, F), with n at most N / 2 / T, in the session that was opened last.

        Raises:
            InputError: the shape is wrong, or values are not finite.
        """
        if self._current is None:
            raise InputError("encrypted rows need a session; begin one")
        limbs = messages.rows_limbs(self.layout.parameters)
        return encrypt_message(self._keys, self._current, self.layout.pack(np.asarray(x, np.float64)), limbs)

    def refresh(self, message: bytes) -> bytes:
        """Encrypt the masked values of a message again.

        Raises:
            ClientFault: the message is not the next one of an open session.
        """
        return answer_refresh(self._keys, self._channel(session_of(message)), message, self._floor)

    def decrypt_released(self, message: bytes, samples: int) -> NDArray[np.float32]:
        """Decrypt a block's disclosed activations (samples, P, width), which are divided by the block's scale.

        Rows that are out of range get zeros.

        Raises:
            ClientFault: the message is not the next one of an open session.
            OutOfRange: in the first block all rows are out of range, because the keys are not this key holder's.
        """
        tokens = self.layout.tokens
        channel = self._channel(session_of(message))
        residues, scale = channel.unpack(message, limbs=messages.RELEASE_LIMBS - 1, note=messages.NOTE.size)
        kind, block, width, largest = messages.NOTE.unpack(note_of(message, messages.NOTE.size))
        if kind >= len(KINDS) or not (math.isfinite(largest) and largest > 0):
            raise ClientFault(E_FORMAT, "disclosed activations of an unknown kind came")
        shape = Released.for_receiver(KINDS[kind], tokens, width)
        if len(residues) != shape.ciphertexts or not 1 <= samples <= self.layout.samples:
            raise ClientFault(
                E_SHAPE, f"{len(residues)} ciphertexts of disclosed activations came, expected {shape.ciphertexts}"
            )
        states = shape.from_slots(self._keys.decrypt(residues, scale), samples)
        return zero_out_of_range(states, largest, block).astype(np.float32)

    def _channel(self, session: bytes) -> Channel:
        if session not in self._channels:
            raise ClientFault(E_ROUND, "the message's session is not open here")
        return self._channels[session]


def zero_out_of_range(states: NDArray[np.float64], largest: float, block: int) -> NDArray[np.float64]:
    """Replace states (samples, P, width) by zeros in rows that are not finite or exceed the model's largest value.

    In such a row, an argument of a polynomial left its interval, or the batch overflowed.

    Raises:
        OutOfRange: in the first block all rows are affected, because the keys are wrong or the batch overflowed.
    """
    worst = np.abs(states).max(axis=(1, 2))
    bad = np.flatnonzero(~(worst <= largest))
    if len(bad) == len(states) and block == 0:
        finite = bool(np.isfinite(worst).all())
        reason = (
            f"disclosed activations of block 1 are up to {worst.max():.4g} in all rows, expected at most {largest:.4g}"
        )
        why = "a row far outside the model's intervals made its batch overflow, or the keys are wrong"
        raise OutOfRange(E_NORM if finite else E_NONFINITE, f"{reason}: {why}")
    out = states.copy()
    out[bad] = 0
    return out
