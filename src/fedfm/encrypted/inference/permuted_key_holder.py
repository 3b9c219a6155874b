"""The key holder's half of the "permuted" protocol, the protocol of BlindFed's paper."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import slot_permutation
from fedfm.encrypted.ckks.remote_refresh import encrypt_message
from fedfm.encrypted.ckks.wire import note_of, session_of
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.key_holder import KeyHolder, zero_out_of_range
from fedfm.encrypted.inference.released_states import Numbers
from fedfm.errors import E_FORMAT, E_NORM, E_SHAPE, ClientFault

_OFF = 0.1  # largest allowed error of an entry in a decrypted one-hot label


class PermutedKeyHolder(KeyHolder):
    """A :class:`~fedfm.encrypted.inference.key_holder.KeyHolder` that also sends labels, and encrypts states again."""

    @property
    def rotations(self) -> set[int]:
        """The rotation steps that move tokens, and the rotation steps that move samples."""
        return self.layout.rotations | slot_permutation.rotations(self.layout)

    def labels(self, session: bytes, labels: NDArray[np.integer], classes: int) -> bytes:
        """Encrypt labels (n,) as one-hot vectors; the entry of class k T + t is token t of ciphertext k."""
        count, tokens = -(-classes // self.layout.tokens), self.layout.tokens
        ones = np.eye(count * tokens)[labels].reshape(-1, count, tokens).transpose(0, 2, 1)
        return encrypt_message(self._keys, self._channel(session), self.layout.pack(ones), messages.RELEASE_LIMBS)

    def states_of(self, message: bytes, samples: int) -> NDArray[np.float64]:
        """Decrypt a block's states (samples, T, d), which are in the owner's order; rows out of range get zeros.

        Raises:
            ClientFault: the message is not the next one of an open session.
            OutOfRange: in the first block all rows are out of range, because the keys are not this key holder's.
        """
        states, block, largest = self._decrypt(message, messages.PERMUTED_STATES, samples)
        return zero_out_of_range(states, largest, block)

    def encrypt_states(self, session: bytes, states: Numbers) -> bytes:
        """Encrypt states (samples, T, d) again, with all primes."""
        return encrypt_message(self._keys, self._channel(session), self.layout.pack(states))

    def labels_of(self, message: bytes, samples: int, classes: int) -> NDArray[np.int64]:
        """Decrypt labels (samples,), which are in the owner's order.

        Raises:
            ClientFault: the message is not the next one of an open session, or has no labels.
        """
        found, *_ = self._decrypt(message, messages.LABELS, samples)
        ones = found.transpose(0, 2, 1).reshape(samples, -1)
        labels = ones.argmax(axis=1)
        if not (np.abs(ones - np.eye(ones.shape[1])[labels]) < _OFF).all() or labels.max() >= classes:
            raise ClientFault(E_NORM, "the returned labels are not one-hot")
        return np.asarray(labels, np.int64)

    def _decrypt(self, message: bytes, kind: int, samples: int) -> tuple[NDArray[np.float64], int, float]:
        """Decrypt a message; return values (samples, T, features), block index, and largest expected magnitude."""
        channel = self._channel(session_of(message))
        residues, scale = channel.unpack(message, limbs=messages.RELEASE_LIMBS - 1, note=messages.NOTE.size)
        came, block, features, largest = messages.NOTE.unpack(note_of(message, messages.NOTE.size))
        if came != kind or not (math.isfinite(largest) and largest > 0):
            raise ClientFault(E_FORMAT, "a message with states or labels has an unknown kind")
        if len(residues) != -(-features // 2) or not 1 <= samples <= self.layout.samples:
            raise ClientFault(
                E_SHAPE, f"{len(residues)} ciphertexts came for {features} features, expected {-(-features // 2)}"
            )
        slots = slot_permutation.unpair_features(self._keys.decrypt_complex(residues, scale), features)
        return self.layout.unpack(slots, samples), block, largest
