"""Client half of BlindFed under CKKS: the secret key, which never leaves the client, and the sessions of batches.

Consecutive messages may reach different processes of the client. So the client's store has the message numbers of each
session. With these numbers, any process can continue a session, and no process accepts a message twice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import Client
from fedfm.encrypted.ckks.wire import Channel, Sender, session_of
from fedfm.encrypted.inference.key_holder import KeyHolder
from fedfm.encrypted.inference.messages import SETS, parameters_of
from fedfm.encrypted.inference.permuted_key_holder import PermutedKeyHolder
from fedfm.encrypted.inference.serialization import of_bytes, to_bytes
from fedfm.errors import E_FORMAT, E_ROUND, E_VERSION, ClientFault
from fedfm.privacy.crypto import keys

_KEY = "ckks"  # name of the CKKS secret key in the client's store; another secret, "channel", is for key agreements


@dataclass
class Sessions:
    """The clients' keys in this process.

    Attributes:
        kind: the class of the key holders.
    """

    kind: ClassVar[type[KeyHolder]] = KeyHolder
    _holders: dict[tuple[str, str], KeyHolder] = field(default_factory=dict)

    def open(self, client: Client, run: str, tokens: int, ring: int, server: Tensor) -> tuple[Tensor, Tensor]:
        """Return the public key for agreements, and the message with the evaluation keys.

        The first call makes the secret key and stores it.

        Raises:
            ClientFault: fedfm has no parameters of 128-bit security for this ring.
        """
        if ring not in [parameters.degree for parameters in SETS]:
            raise ClientFault(E_VERSION, f"the server requests a ring of degree {ring}, which this side does not have")
        if _KEY not in client.store:
            client.store[_KEY] = self.kind.new(tokens, parameters_of(ring)).to_bytes()
        holder = self._holder(client, run)
        own = client.secret("channel")
        message = keys_channel(own, to_bytes(server), run, ring, "client").pack_keys(holder.public())
        return of_bytes(keys.public_of(own)), of_bytes(message)

    def rows(self, client: Client, run: str, server: Tensor, session: Tensor, x: Tensor) -> Tensor:
        """Encrypt rows (n, T, F) in a new session."""
        self.begin(client, session)
        holder, name = self._resume(client, run, server, to_bytes(session))
        message = holder.rows(x.double().numpy())
        self._keep(client, holder, name)
        return of_bytes(message)

    def begin(self, client: Client, session: Tensor) -> None:
        """Open a new session."""
        client.store[_place(to_bytes(session))] = json.dumps([0, 0]).encode()

    def end(self, client: Client, message: Tensor) -> None:
        """Close the session of this message."""
        client.store.pop(_place(session_of(to_bytes(message))), None)

    def refresh(self, client: Client, run: str, server: Tensor, message: Tensor) -> Tensor:
        """Encrypt masked values again."""
        asked = to_bytes(message)
        holder, name = self._resume(client, run, server, session_of(asked))
        answer = holder.refresh(asked)
        self._keep(client, holder, name)
        return of_bytes(answer)

    def decrypt_released(self, client: Client, run: str, server: Tensor, message: Tensor, samples: int) -> Tensor:
        """Decrypt disclosed activations (n, P, d)."""
        came = to_bytes(message)
        holder, name = self._resume(client, run, server, session_of(came))
        states = holder.decrypt_released(came, samples)
        self._keep(client, holder, name)
        return torch.from_numpy(states)

    def _holder(self, client: Client, run: str) -> KeyHolder:
        key = client.id, run
        if key not in self._holders:
            self._holders[key] = self.kind.from_bytes(client.store[_KEY])
        return self._holders[key]

    def _resume(self, client: Client, run: str, server: Tensor, name: bytes) -> tuple[KeyHolder, bytes]:
        """Load the key holder and open this session at its stored message numbers; return holder and session name."""
        if _place(name) not in client.store:
            raise ClientFault(E_ROUND, "the message's session is not open")
        holder, (sent, received) = self._holder(client, run), json.loads(client.store[_place(name)])
        key = keys.agree(client.secret("channel"), to_bytes(server), name)
        holder.begin(name, key, (sent, received))
        return holder, name

    def _keep(self, client: Client, holder: KeyHolder, name: bytes) -> None:
        client.store[_place(name)] = json.dumps(list(holder.counts(name))).encode()
        holder.end(name)


class PermutedSessions(Sessions):
    """The :class:`Sessions` of the "permuted" protocol, with a :class:`PermutedKeyHolder`."""

    kind: ClassVar[type[KeyHolder]] = PermutedKeyHolder

    def labels(self, client: Client, run: str, server: Tensor, session: Tensor, labels: Tensor, classes: int) -> Tensor:
        """Encrypt the labels of a batch, in the session that :meth:`rows` or :meth:`begin` opened."""
        holder, name = self._resume_permuted(client, run, server, to_bytes(session))
        message = holder.labels(name, labels.numpy(), classes)
        self._keep(client, holder, name)
        return of_bytes(message)

    def exchange_states(
        self, client: Client, run: str, server: Tensor, message: Tensor, samples: int, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Decrypt states (n, T, d), and encrypt them again; after the last block the second result is empty."""
        came = to_bytes(message)
        holder, name = self._resume_permuted(client, run, server, session_of(came))
        states = holder.states_of(came, samples)
        answer = b"" if last else holder.encrypt_states(name, states)
        self._keep(client, holder, name)
        return torch.from_numpy(states.astype(np.float32)), of_bytes(answer)

    def labels_of(
        self, client: Client, run: str, server: Tensor, message: Tensor, samples: int, classes: int
    ) -> Tensor:
        """Decrypt labels (n,), which are in the server's last order, and close the session."""
        came = to_bytes(message)
        holder, name = self._resume_permuted(client, run, server, session_of(came))
        labels = holder.labels_of(came, samples, classes)
        self._keep(client, holder, name)
        self.end(client, message)
        return torch.from_numpy(labels)

    def _resume_permuted(
        self, client: Client, run: str, server: Tensor, name: bytes
    ) -> tuple[PermutedKeyHolder, bytes]:
        holder, name = self._resume(client, run, server, name)
        return cast(PermutedKeyHolder, holder), name


def keys_channel(own: bytes, other: bytes, run: str, ring: int, side: Sender) -> Channel:
    """Make the channel for the message with the evaluation keys, in the session of the run.

    Args:
        own, other: this side's secret key and the other side's public key, for key agreements.
        run: the session of the run, :attr:`~fedfm.encrypted.protocol.handshake.Hello.session`.

    Raises:
        ClientFault: the other side's key is not a valid key.
    """
    session = bytes.fromhex(run)
    try:
        return Channel(parameters_of(ring), keys.agree(own, other, session), session, side)
    except ValueError:
        raise ClientFault(E_FORMAT, "the key for agreements is not a valid key") from None


def _place(session: bytes) -> str:
    return f"session-{session.hex()}"
