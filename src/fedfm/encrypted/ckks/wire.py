"""Pack ciphertexts as messages between one client and the server; check messages before any computation.

CKKS has no integrity check: decryption with another key gives noise, and a flipped bit gives another valid ciphertext.
So a message states its purpose and has a tag (HMAC-SHA-256) under the key that both sides share. The receiver compares
the message with the number, level and scale that it expects. Each residue takes as many bits as its prime. For fresh
ciphertexts a seed replaces the second polynomials.
"""

from __future__ import annotations

import hmac
import math
import struct
from typing import Literal

import numpy as np

from fedfm.encrypted.ckks import modular_kernels, zero_encryptions
from fedfm.encrypted.ckks.ring import Parameters, Residues
from fedfm.errors import E_FORMAT, E_ROUND, E_SHAPE, E_SIZE, E_VERSION, ClientFault, InputError
from fedfm.privacy.crypto.keys import KEY

SESSION = 16  # length of a session's name in bytes
_HEADER = struct.Struct("<4sBBB16sQIBBd32s32s")
_MARK, _VERSION, _TAG = b"FFCT", 2, 32
_SESSION_AT = 7  # number of bytes before the session in the header
_FULL, _SEEDED, _BYTES = range(3)
_LARGEST_SCALE = 2.0**120
Sender = Literal["client", "server"]


class Channel:
    """One side of a session. The messages of each direction are numbered; each is accepted only once and in order.

    Args:
        parameters: the parameters that both sides agreed on.
        key: 32 bytes that only both sides have, e.g. from :func:`fedfm.privacy.crypto.keys.agree`.
        session: 16 bytes, new for each session.
        sender: name of this side, "client" or "server".
        most: largest allowed number of ciphertexts in a message.

    Raises:
        InputError: the key or the session has a wrong length.
    """

    def __init__(
        self, parameters: Parameters, key: bytes, session: bytes, sender: Sender, *, most: int = 1 << 14
    ) -> None:
        if len(key) != KEY or len(session) != SESSION:
            raise InputError(f"a session needs a key of {KEY} bytes and a name of {SESSION} bytes")
        self.parameters, self._key, self._session, self._most = parameters, key, session, most
        self._side = int(sender == "server")
        self.sent = self.received = 0

    def pack(self, residues: Residues, scale: float, seed: bytes | None = None, note: bytes = b"") -> bytes:
        """Pack ciphertexts (count, 2, limbs, N) as the next message. A seed replaces their second polynomials.

        The second polynomials must then be :func:`fedfm.encrypted.ckks.zero_encryptions.uniform` of this seed. A note
        follows the ciphertexts (:func:`note_of`).
        """
        count, polynomials, limbs, degree = residues.shape
        if polynomials != 2 or degree != self.parameters.degree or not 1 <= count <= self._most:
            raise InputError(f"residues of shape {residues.shape} cannot be a message")
        sent = 1 if seed else 2
        words = np.empty((count, sent, self._bytes(limbs) // 8), np.uint64)
        bits = np.array(self.parameters.bits[:limbs], np.int64)
        modular_kernels.pack_rows(np.ascontiguousarray(residues), bits, words)
        kind = _SEEDED if seed else _FULL
        words = words.astype("<u8", copy=False)
        return self._seal(kind, count, limbs, scale, seed or bytes(32), words.data.cast("B"), note)

    def pack_keys(self, data: bytes) -> bytes:
        """Pack public keys as the next message."""
        return self._seal(_BYTES, 1, 1, 1.0, bytes(32), data)

    def unpack_keys(self, data: bytes) -> bytes:
        """Check and unpack a message of :meth:`pack_keys`.

        Raises:
            ClientFault: for the reasons of :meth:`unpack`.
        """
        kind, *_ = self._unseal(data)
        if kind != _BYTES:
            raise ClientFault(E_FORMAT, "ciphertexts came, but keys were expected")
        self.received += 1
        return data[_HEADER.size : -_TAG]

    def unpack(
        self, data: bytes, *, limbs: int, count: int | None = None, scale: float | None = None, note: int = 0
    ) -> tuple[Residues, float]:
        """Check the next message, and return its ciphertexts (count, 2, limbs, N) and their scale.

        ``limbs``, ``count`` and ``scale`` are the expected values; None accepts any value. ``note`` is the length in
        bytes of the note after the ciphertexts.

        Raises:
            ClientFault: the message is damaged or altered; it is from another session, step or sender; its parameters,
                count, level or scale differ from the expected ones; or it has invalid residues or readable ciphertexts.
        """
        kind, got_count, got_limbs, got_scale, seed = self._unseal(data)
        if kind == _BYTES:
            raise ClientFault(E_FORMAT, "keys came, but ciphertexts were expected")
        if got_limbs != limbs:
            raise ClientFault(E_SHAPE, f"ciphertexts of {got_limbs} primes came, {limbs} were expected")
        if not 1 <= got_count <= self._most or (count is not None and got_count != count):
            raise ClientFault(E_SHAPE, f"{got_count} ciphertexts came, {count or f'1 to {self._most}'} were expected")
        if not (math.isfinite(got_scale) and 1 <= got_scale <= _LARGEST_SCALE) or scale not in (None, got_scale):
            raise ClientFault(E_SHAPE, f"ciphertexts of scale {got_scale!r} came, {scale or 'at least 1'} was expected")
        sent = 1 if kind == _SEEDED else 2
        if len(data) != _HEADER.size + got_count * sent * self._bytes(limbs) + note + _TAG:
            raise ClientFault(E_SIZE, f"a message of {len(data)} bytes cannot have {got_count} ciphertexts")
        count = (len(data) - _HEADER.size - note - _TAG) // 8
        words = np.empty((got_count, sent, self._bytes(limbs) // 8), np.uint64)  # aligned, unlike those in the message
        words.reshape(-1)[:] = np.frombuffer(data, "<u8", count, _HEADER.size)
        bits = np.array(self.parameters.bits[:limbs], np.int64)
        out = np.empty((got_count, 2, limbs, self.parameters.degree), np.int64)
        primes = np.array(self.parameters.primes[:limbs], np.int64)
        fits = modular_kernels.unpack_rows(words, bits, out, primes)
        if kind == _SEEDED:
            out[:, 1] = zero_encryptions.uniform(seed, got_count, limbs, self.parameters)
        if not fits:
            raise ClientFault(E_FORMAT, "a residue is not below its prime")
        if not out[:, 1].any(axis=(1, 2)).all():
            raise ClientFault(E_FORMAT, "a ciphertext is readable without a key")
        self.received += 1
        return out, got_scale

    def _bytes(self, limbs: int) -> int:
        """Return the length of a packed polynomial in bytes; N is a multiple of 64."""
        return sum(self.parameters.bits[:limbs]) * self.parameters.degree // 8

    def _seal(
        self,
        kind: int,
        count: int,
        limbs: int,
        scale: float,
        seed: bytes,
        content: bytes | memoryview,
        note: bytes = b"",
    ) -> bytes:
        self.sent += 1
        header = _HEADER.pack(
            _MARK, _VERSION, kind, self._side, self._session, self.sent, count, limbs, 2, scale, self.parameters.digest,
            seed,
        )  # fmt: skip
        tag = hmac.new(self._key, header, "sha256")
        tag.update(content)
        tag.update(note)
        return b"".join((header, content, note, tag.digest()))

    def _unseal(self, data: bytes) -> tuple[int, int, int, float, bytes]:
        """Check that a message is the next one, and return its kind, count, limbs, scale and seed."""
        if len(data) < _HEADER.size + _TAG:
            raise ClientFault(E_SIZE, f"a message of {len(data)} bytes is cut off")
        mark, version, kind, side, session, step, count, limbs, polynomials, scale, digest, seed = _HEADER.unpack_from(
            data
        )
        if mark != _MARK:
            raise ClientFault(E_FORMAT, "this is not a message with ciphertexts")
        if version != _VERSION:
            raise ClientFault(E_VERSION, f"a message of version {version} came, {_VERSION} was expected")
        if not hmac.compare_digest(hmac.digest(self._key, memoryview(data)[:-_TAG], "sha256"), data[-_TAG:]):
            raise ClientFault(E_FORMAT, "a message was altered, cut off, or made with another key")
        if digest != self.parameters.digest:
            raise ClientFault(E_VERSION, "the other side uses other encryption parameters")
        if session != self._session or side == self._side:
            raise ClientFault(E_ROUND, "a message came from another session, or from this side itself")
        if step != self.received + 1:
            raise ClientFault(E_ROUND, f"message {step} came, {self.received + 1} was expected")
        if kind not in (_FULL, _SEEDED, _BYTES) or polynomials != 2:
            raise ClientFault(E_FORMAT, "a message of unknown kind")
        return kind, count, limbs, scale, seed


def note_of(data: bytes, size: int) -> bytes:
    """Return the note of a message that :meth:`Channel.unpack` has accepted with ``note = size``."""
    return data[-_TAG - size : -_TAG]


def session_of(data: bytes) -> bytes:
    """Return the name of an unchecked message's session. The name selects the channel that checks the message.

    Raises:
        ClientFault: the message is too short.
    """
    if len(data) < _HEADER.size + _TAG:
        raise ClientFault(E_SIZE, f"a message of {len(data)} bytes is cut off")
    return bytes(data[_SESSION_AT : _SESSION_AT + SESSION])
