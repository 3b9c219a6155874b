"""Encrypted inference by the paper's protocol of BlindFed ("permuted"), the half of whoever has the rows."""

from __future__ import annotations

import math
from typing import ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedfm.core.client import Client
from fedfm.errors import E_FORMAT, E_NORM, E_SHAPE, ClientFault
from fedfm.methods.blindfed import messages
from fedfm.methods.blindfed.as_bytes import of_bytes, to_bytes
from fedfm.methods.blindfed.holder import Holder, checked
from fedfm.methods.blindfed.releases import Numbers
from fedfm.methods.blindfed.sessions import Sessions
from fedfm.privacy.crypto import slot_orders
from fedfm.privacy.crypto.ciphertext_wire import note_of, session_of
from fedfm.privacy.crypto.refresh_link import sealed

_OFF = 0.1  # of a number of an encrypted label: 0 or 1


class PermutedHolder(Holder):
    """As :class:`~fedfm.methods.blindfed.holder.Holder`; it also sends labels, and returns states."""

    @property
    def rotations(self) -> set[int]:
        """With those that move samples."""
        return self.layout.rotations | slot_orders.rotations(self.layout)

    def labels(self, session: bytes, labels: NDArray[np.integer], classes: int) -> bytes:
        """Encrypted labels (n,), one number a class: class k T + t in token t of ciphertext k."""
        count, tokens = -(-classes // self.layout.tokens), self.layout.tokens
        ones = np.eye(count * tokens)[labels].reshape(-1, count, tokens).transpose(0, 2, 1)
        return sealed(self._keys, self._channel(session), self.layout.pack(ones), messages.RELEASE_LIMBS)

    def turned(self, message: bytes, samples: int) -> NDArray[np.float64]:
        """States of a block, (samples, T, d), in the owner's order; zeros for rows out of range.

        Raises:
            ClientFault: the message is not the next one of an open session.
            OutOfRange: the first block's states of all rows are: the keys are not those of this holder.
        """
        states, block, largest = self._ordered(message, messages.TURNED, samples)
        return checked(states, largest, block)

    def again(self, session: bytes, states: Numbers) -> bytes:
        """Fresh encryptions of states (samples, T, d), with all primes."""
        return sealed(self._keys, self._channel(session), self.layout.pack(states))

    def labels_of(self, message: bytes, samples: int, classes: int) -> NDArray[np.int64]:
        """Labels (samples,) in the owner's order.

        Raises:
            ClientFault: the message is not the next one of an open session, or holds no labels.
        """
        found, *_ = self._ordered(message, messages.LABELS, samples)
        ones = found.transpose(0, 2, 1).reshape(samples, -1)
        labels = ones.argmax(axis=1)
        if not (np.abs(ones - np.eye(ones.shape[1])[labels]) < _OFF).all() or labels.max() >= classes:
            raise ClientFault(E_NORM, "encrypted labels came back as something else")
        return np.asarray(labels, np.int64)

    def _ordered(self, message: bytes, kind: int, samples: int) -> tuple[NDArray[np.float64], int, float]:
        """Numbers (samples, T, features), the number of the block, and the largest that is expected."""
        channel = self._channel(session_of(message))
        residues, scale = channel.unpack(message, limbs=messages.RELEASE_LIMBS - 1, note=messages.NOTE.size)
        came, block, features, largest = messages.NOTE.unpack(note_of(message, messages.NOTE.size))
        if came != kind or not (math.isfinite(largest) and largest > 0):
            raise ClientFault(E_FORMAT, "states or labels of an unknown kind came")
        if len(residues) != -(-features // 2) or not 1 <= samples <= self.layout.samples:
            raise ClientFault(E_SHAPE, f"{len(residues)} ciphertexts of {features} features: expected half as many")
        slots = slot_orders.unpaired(self._keys.decrypt_complex(residues, scale), features)
        return self.layout.unpack(slots, samples), block, largest


class PermutedSessions(Sessions):
    """As :class:`~fedfm.methods.blindfed.sessions.Sessions`, for :class:`PermutedHolder`."""

    kind: ClassVar[type[Holder]] = PermutedHolder

    def labels(self, client: Client, run: str, server: Tensor, session: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Encrypted labels of a batch, in the session that its rows or :meth:`begin` opened."""
        holder, name = self._permuted(client, run, server, to_bytes(session))
        message = holder.labels(name, labels.numpy(), classes)
        self._keep(client, holder, name)
        return of_bytes(message)

    def turned(
        self, client: Client, run: str, server: Tensor, message: Tensor, samples: int, last: bool
    ) -> tuple[Tensor, Tensor]:
        """States (n, T, d), and fresh encryptions of them; after the last block there is nothing to go on with."""
        came = to_bytes(message)
        holder, name = self._permuted(client, run, server, session_of(came))
        states = holder.turned(came, samples)
        answer = b"" if last else holder.again(name, states)
        self._keep(client, holder, name)
        return torch.from_numpy(states.astype(np.float32)), of_bytes(answer)

    def labels_of(
        self, client: Client, run: str, server: Tensor, message: Tensor, samples: int, classes: int
    ) -> Tensor:
        """Labels (n,) in the server's last order; the session is over."""
        came = to_bytes(message)
        holder, name = self._permuted(client, run, server, session_of(came))
        labels = holder.labels_of(came, samples, classes)
        self._keep(client, holder, name)
        self.end(client, message)
        return torch.from_numpy(labels)

    def _permuted(self, client: Client, run: str, server: Tensor, name: bytes) -> tuple[PermutedHolder, bytes]:
        holder, name = self._resumed(client, run, server, name)
        return cast(PermutedHolder, holder), name
