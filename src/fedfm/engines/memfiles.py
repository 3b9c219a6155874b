"""Memory files that processes of one machine share: payloads that all read, replies that one writes and one reads.

An anonymous memory file's descriptor goes with a control message. A payload's file lives as long as its exchange; a
worker's replies go to a few files that stay mapped on both sides, in turn, since new pages cost ten times what writing
to old ones does.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedfm import codec, wire
from fedfm.federation import Request

_BOX = 1 << 23  # bytes of replies up to which a worker keeps a file
_BOXES = 3  # files of a worker's replies: one is read, one may be full, one is written


class Payloads:
    """The payloads of one exchange, each encoded once into a memory file; one that differs by client stays no longer
    than its request takes.

    Attributes:
        files: descriptors by the payload's number, -1 of one that is done with.
        heads: bytes of its head, which come first in the file.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._uses = Counter(id(request.payload) for request in requests)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that an id is not used twice
        self.files: list[int] = []
        self.heads: list[int] = []
        self._nbytes: list[int] = []

    def number(self, request: Request) -> int:
        """Of its payload, which is encoded if it is new."""
        key = id(request.payload)
        if key not in self._numbers:
            self._numbers[key] = len(self.files)
            self._kept.append(request.payload)
            head, pieces = wire.encode(request.payload)
            self.files.append(_write([head.encode(), *pieces]))
            self.heads.append(len(head))
            self._nbytes.append(codec.enveloped(len(head), sum(map(len, pieces))))
        return self._numbers[key]

    def once(self, request: Request) -> bool:
        """No other request has this payload."""
        return self._uses[id(request.payload)] == 1

    def answered(self, request: Request) -> None:
        """Its reply is there."""
        number = self._numbers[id(request.payload)]
        if self.once(request) and self.files[number] >= 0:
            os.close(self.files[number])
            self.files[number] = -1

    def nbytes(self, request: Request) -> int:
        """Of its message on Flower's wire."""
        return self._nbytes[self._numbers[id(request.payload)]]

    def close(self) -> None:
        """End of the exchange."""
        for fd in self.files:
            if fd >= 0:
                os.close(fd)


def _write(pieces: Sequence[bytes | memoryview]) -> int:
    """A new memory file that holds them one after the other."""
    fd = _memory_file()
    with os.fdopen(os.dup(fd), "wb", buffering=1 << 20) as file:
        for piece in pieces:
            file.write(piece)
        if not any(map(len, pieces)):
            file.write(b"\0")  # an empty file cannot be mapped
    return fd


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedfm", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def read(fd: int) -> memoryview:
    """The file's bytes, mapped; the descriptor is closed."""
    try:
        return memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


class Outbox:
    """The files that a worker's replies go to in turn."""

    def __init__(self) -> None:
        self._boxes: list[mmap.mmap | None] = [None] * _BOXES
        self._turn = 0

    def put(self, pieces: Sequence[bytes | memoryview]) -> tuple[int, list[int]]:
        """Which file holds them now (-1: one of their own), and its descriptor where the server does not know it."""
        size = sum(map(len, pieces))
        if size > _BOX:
            return -1, [_write(pieces)]
        self._turn = (self._turn + 1) % _BOXES
        box, fds = self._boxes[self._turn], []
        if box is None or len(box) < size:
            capacity, fd = 1 << max(size - 1, 1 << 12).bit_length(), _memory_file()
            os.ftruncate(fd, capacity)  # pages are taken when they are written to
            box, fds = mmap.mmap(fd, capacity), [fd]
            self._boxes[self._turn] = box
        at = 0
        for piece in pieces:
            box[at : at + len(piece)] = piece
            at += len(piece)
        return self._turn, fds
