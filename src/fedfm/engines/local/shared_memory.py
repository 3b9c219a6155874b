"""Memory files that processes of one machine share: payloads that all read, replies that one writes and one reads.

An anonymous memory file's descriptor goes with a control message, and the tensors of what it holds are views of it: of
a payload, of which each client has its own copy the moment it writes to one, and of replies. A worker's replies go to a
few files that stay mapped on both sides, since new pages cost ten times what writing to old ones does; each is the
server's until no tensor in it is left.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedfm.core.messages import Request
from fedfm.core.wire import codec, payload

_BOX = 1 << 23  # bytes of replies up to which a worker keeps a file
_BOXES = 6  # files of a worker's replies: a mean holds up to three, one is read, one may be full, one is written
_LINE = 64  # data begin at a multiple, so that tensors can be views of them


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
            head, pieces = payload.encode(request.payload)
            self.files.append(_write(laid_out(0, head, pieces)))
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


def laid_out(at: int, head: str, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A message as it lies in a file from ``at`` on, piece by piece: its head, a gap, its data."""
    text = head.encode()
    return [text, bytes(data_at(at, len(text)) - at - len(text)), *pieces]


def data_at(at: int, head: int) -> int:
    """Where the data of a message begin that begins at ``at`` with a head of so many bytes."""
    return -(-(at + head) // _LINE) * _LINE


def message(block: np.ndarray, at: int, head: int, data: int) -> Any:
    """The value of a message that begins at ``at``, its tensors views of ``block``; unchecked.

    Raises:
        ClientFault: it is malformed.
    """
    begin = data_at(at, head)
    return payload.decode(str(block[at : at + head].data, "utf-8"), block[begin : begin + data], None)


def mapped(fd: int, *, shared: bool) -> np.ndarray:
    """The file's bytes (n,), where they lie; the descriptor is closed.

    Args:
        shared: what others write to it is seen; else nobody does any more, and what is written here stays here.
    """
    try:
        # Python's mmap would keep a descriptor as long as the memory, and a server may keep a thousand replies.
        size = os.fstat(fd).st_size
        return torch.from_file(f"/dev/fd/{fd}", shared=shared, size=size, dtype=torch.uint8).numpy()
    finally:
        os.close(fd)


class Outbox:
    """The files that a worker's replies go to."""

    def __init__(self) -> None:
        self._boxes: list[mmap.mmap] = []
        self._free: list[int] = []  # the last one is the likeliest to be in the caches

    def freed(self, boxes: Sequence[int]) -> None:
        """The server reads these no more."""
        self._free += boxes

    def put(self, pieces: Sequence[bytes | memoryview]) -> tuple[int, list[int]]:
        """Which file holds them now (-1: one of their own), and its descriptor where the server does not know it."""
        size = sum(map(len, pieces))
        turn, fds = self._room(size)
        if turn < 0:
            return -1, [_write(pieces)]
        box, at = self._boxes[turn], 0
        for piece in pieces:
            box[at : at + len(piece)] = piece
            at += len(piece)
        return turn, fds

    def _room(self, size: int) -> tuple[int, list[int]]:
        """A file with so much room that nobody reads, and its descriptor if it is new; -1 where there shall be none."""
        if size > _BOX:
            return -1, []
        if fit := [box for box in self._free if len(self._boxes[box]) >= size]:
            self._free.remove(fit[-1])
            return fit[-1], []
        if len(self._boxes) == _BOXES and not self._free:
            return -1, []
        capacity, fd = 1 << max(size - 1, 1 << 12).bit_length(), _memory_file()
        os.ftruncate(fd, capacity)  # pages are taken when they are written to
        box = mmap.mmap(fd, capacity)
        if len(self._boxes) < _BOXES:
            self._boxes.append(box)
            return len(self._boxes) - 1, [fd]
        turn = self._free.pop()
        self._boxes[turn] = box
        return turn, [fd]
