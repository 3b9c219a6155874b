"""A letter: one message in one file, encrypted for its receiver and authenticated by its sender. No pickle is used.

The file has a magic line with the format's version, the length of a header (4 bytes, little-endian), the header (JSON:
kind, sender, receiver, run, number, size), and the content in pieces of at most :data:`PIECE` bytes. Each piece is
encrypted by ChaCha20-Poly1305 with a key that sender and receiver derive from their permanent keys (X25519). The header
and the piece's position are authenticated, too. So a file of another sender, run or direction cannot be opened, and
neither can a file in which a piece is changed, moved or missing. Only sender and receiver can make a file that the
other side can open.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fedfm.errors import InputError
from fedfm.privacy.crypto import keys

MAGIC = b"fedfm letter 1\n"
PIECE = 16 << 20  # bytes of content that are encrypted together
SERVER = "server"  # the server's name as a sender and a receiver
REQUEST, REPLY = "request", "reply"
_LENGTH, _PARTS = struct.Struct("<I"), struct.Struct("<II")
_LONGEST = 1 << 14  # largest header in bytes
_FRONT = 4 << 20  # largest front in bytes; it contains an experiment's text


@dataclass(frozen=True)
class Header:
    """The unencrypted header of a letter.

    Attributes:
        kind: request or reply.
        sender, receiver: "server" or a silo's name.
        run: key of the run.
        number: number of the request, counted from 1 for each silo and run; a reply has the number of its request.
        size: bytes of the content.
    """

    kind: str
    sender: str
    receiver: str
    run: str
    number: int
    size: int


@dataclass(frozen=True)
class Content:
    """The encrypted content of a letter.

    Attributes:
        front: entries before the message. A request has ``handler`` and ``experiment``. A reply has ``request``, the
            digest of its request.
        head, data: the message's parts, see :mod:`fedfm.core.wire.payload`.
    """

    front: dict[str, Any]
    head: str
    data: bytes


def digest(handler: str, head: str, data: Iterable[bytes | memoryview]) -> str:
    """A hash that identifies a request by its content, which includes round and call: 64 hexadecimal digits."""
    found = hashlib.sha256(keys.encode(handler, head))
    for piece in data:
        found.update(piece)
    return found.hexdigest()


def shared_key(private: bytes, public: bytes) -> bytes:
    """The key that two sides share, computed from one side's private key and the other side's public key.

    Raises:
        InputError: ``public`` is not the public half of an Ed25519 key.
    """
    try:
        return keys.agree(keys.exchange_of(private), keys.exchange_public_of(public), "fedfm letter", 1)
    except ValueError:
        raise InputError(
            f"{public.hex()} is not a public key: expected the one that fedfm prints on its owner's machine"
        ) from None


def seal(key: bytes, header: Header, content: Content) -> list[bytes]:
    """Encrypt a letter; returns the parts of its file, with the header's ``size`` filled in."""
    front, head = json.dumps(content.front).encode(), content.head.encode()
    plain = b"".join((_PARTS.pack(len(front), len(head)), front, head, content.data))
    outside = json.dumps({**vars(header), "size": len(plain)}, separators=(",", ":")).encode()
    pieces = [plain[at : at + PIECE] for at in range(0, len(plain), PIECE)]
    body = [keys.seal(key, piece, MAGIC, outside, place) for place, piece in enumerate(pieces)]
    return [MAGIC + _LENGTH.pack(len(outside)) + outside, *body]


class Letter:
    """A file that may be a letter, open for reading; use it in a ``with`` statement.

    Attributes:
        header: not encrypted; do not trust it before :meth:`content` has returned.

    Raises:
        Unfinished: the file is incomplete.
        ValueError: the file is not a letter; the text says why.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        # Refuse links and pipes: with them other users of the folder could choose what is read, or block this process.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError("a link") from None
            raise
        self._file: BinaryIO = os.fdopen(descriptor, "rb")
        try:
            self.header, self._outside = self._head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Letter:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _head(self) -> tuple[Header, bytes]:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file")
        begin = self._file.read(len(MAGIC))
        if begin != MAGIC[: len(begin)]:
            raise ValueError("not a letter of this version of the format")
        length = self._file.read(_LENGTH.size)
        if len(length) < _LENGTH.size:
            raise Unfinished
        (count,) = _LENGTH.unpack(length)
        if count > _LONGEST:
            raise ValueError(f"the header has {count} bytes, expected at most {_LONGEST}")
        outside = self._file.read(count)
        if len(outside) < count:
            raise Unfinished
        header = _header(outside)
        expected = self._file.tell() + header.size + -(-header.size // PIECE) * keys.SEALED
        if status.st_size < expected:
            raise Unfinished
        if status.st_size > expected:
            raise ValueError(f"{status.st_size} bytes, but its header requires {expected}")
        return header, outside

    def content(self, key: bytes) -> Content:
        """Decrypt the content. Nothing is returned unless every byte is unchanged.

        Raises:
            ValueError: the content was altered, or neither of the two sides made it.
        """
        plain, size = bytearray(), self.header.size
        for place in range(-(-size // PIECE)):
            piece = self._file.read(min(PIECE, size - place * PIECE) + keys.SEALED)
            try:
                plain += keys.unseal(key, piece, MAGIC, self._outside, place)
            except ValueError:
                raise ValueError("altered, or written by another sender") from None
        try:
            front, head = _PARTS.unpack_from(plain)
            at = _PARTS.size + front
            if front > _FRONT or at + head > len(plain):
                raise ValueError
            front_table = json.loads(plain[_PARTS.size : at])
            if not isinstance(front_table, dict):
                raise TypeError
            return Content(front_table, plain[at : at + head].decode(), bytes(memoryview(plain)[at + head :]))
        except (ValueError, TypeError, RecursionError, struct.error):
            raise ValueError("the sender's version of fedfm wrote content that this version cannot read") from None


class Unfinished(Exception):
    """The file is not complete yet, e.g. during a sync or a copy."""


def _header(outside: bytes) -> Header:
    """Read a header.

    Raises:
        ValueError: the header is malformed.
    """
    try:
        table = json.loads(outside)
        header = Header(**table)
    except (ValueError, TypeError, RecursionError):
        raise ValueError("its header cannot be read") from None
    texts: Sequence[Any] = (header.kind, header.sender, header.receiver, header.run)
    numbers: Sequence[Any] = (header.number, header.size)
    if not all(isinstance(text, str) for text in texts) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("its header cannot be read")
    return header
