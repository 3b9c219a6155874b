"""Anonymous memory files that processes of one machine share, for payloads and for each worker's replies.

A control message passes a file's descriptor, and tensors are views of the file. Payloads are mapped copy-on-write. A
worker writes its replies to a few files that stay mapped on both sides, because writing to new pages takes ten times
as long. While the server uses a tensor in such a file, the worker does not write to the file.
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
from fedfm.core.wire import payload
from fedfm.core.wire.envelope import envelope_size

_BOX = 1 << 23  # a worker reuses a file for replies of at most this many bytes
_BOXES = 6  # most files of a worker's replies: a mean uses up to three, one is read, one may be full, one is written
_LINE = 64  # data begin at a multiple of this many bytes, so that tensors can be views


class Payloads:
    """The payloads of one exchange, each encoded once into a memory file.

    A payload of only one request is removed when the reply to that request is read.

    Attributes:
        files: descriptor of each payload's file, by the payload's number; -1 if the file is closed.
        heads: length in bytes of each head, which is at the beginning of its file.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._uses = Counter(id(request.payload) for request in requests)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps the payloads alive, so that each id stays unique
        self.files: list[int] = []
        self.heads: list[int] = []
        self._nbytes: list[int] = []

    def number(self, request: Request) -> int:
        """The number of the request's payload; a new payload is encoded first."""
        key = id(request.payload)
        if key not in self._numbers:
            self._numbers[key] = len(self.files)
            self._kept.append(request.payload)
            head, pieces = payload.encode(request.payload)
            self.files.append(_write(laid_out(0, head, pieces)))
            self.heads.append(len(head))
            self._nbytes.append(envelope_size(len(head), sum(map(len, pieces))))
        return self._numbers[key]

    def once(self, request: Request) -> bool:
        """Whether no other request has the same payload."""
        return self._uses[id(request.payload)] == 1

    def release(self, request: Request) -> None:
        """Remove the request's payload unless another request has it, too."""
        number = self._numbers[id(request.payload)]
        if self.once(request) and self.files[number] >= 0:
            os.close(self.files[number])
            self.files[number] = -1

    def nbytes(self, request: Request) -> int:
        """Size that the request's message would have in Flower."""
        return self._nbytes[self._numbers[id(request.payload)]]

    def close(self) -> None:
        for fd in self.files:
            if fd >= 0:
                os.close(fd)


def _write(pieces: Sequence[bytes | memoryview]) -> int:
    """Make a memory file of these pieces; returns its descriptor."""
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
    """The pieces of a message that begins at ``at`` in a file: head, gap, data."""
    text = head.encode()
    return [text, bytes(data_at(at, len(text)) - at - len(text)), *pieces]


def data_at(at: int, head: int) -> int:
    """Where the data of a message begin, if the message begins at ``at`` with a head of ``head`` bytes."""
    return -(-(at + head) // _LINE) * _LINE


def message(block: np.ndarray, at: int, head: int, data: int, most: int) -> Any:
    """The value of a message that begins at ``at``, not yet checked; its tensors are views of ``block``.

    Raises:
        ClientFault: the message is malformed.
    """
    begin = data_at(at, head)
    return payload.decode(str(block[at : at + head].data, "utf-8"), block[begin : begin + data], None, most=most)


def map_file(fd: int, *, shared: bool) -> np.ndarray:
    """Map a file into memory; returns its bytes (n,) and closes the descriptor.

    Args:
        shared: whether processes share writes; otherwise the mapping is copy-on-write.
    """
    try:
        # Python's mmap would keep one descriptor open per reply, and there may be a thousand replies.
        size = os.fstat(fd).st_size
        return torch.from_file(f"/dev/fd/{fd}", shared=shared, size=size, dtype=torch.uint8).numpy()
    finally:
        os.close(fd)


class Outbox:
    """The files of a worker's replies."""

    def __init__(self) -> None:
        self._boxes: list[mmap.mmap] = []
        self._free: list[int] = []  # the last one is most likely in the processor's caches

    def mark_free(self, boxes: Sequence[int]) -> None:
        """Mark files as free, because the server no longer reads them."""
        self._free += boxes

    def put(self, pieces: Sequence[bytes | memoryview]) -> tuple[int, list[int]]:
        """Write the pieces. Returns the file's number, and the file's descriptor if it is new.

        The number is -1 if the file contains only these pieces.
        """
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
        """Number of a free file with room for ``size`` bytes, and its descriptor if it is new; -1 if there is none."""
        if size > _BOX:
            return -1, []
        if fit := [box for box in self._free if len(self._boxes[box]) >= size]:
            self._free.remove(fit[-1])
            return fit[-1], []
        if len(self._boxes) == _BOXES and not self._free:
            return -1, []
        capacity, fd = 1 << max(size - 1, 1 << 12).bit_length(), _memory_file()
        os.ftruncate(fd, capacity)  # memory pages are allocated only when they are written
        box = mmap.mmap(fd, capacity)
        if len(self._boxes) < _BOXES:
            self._boxes.append(box)
            return len(self._boxes) - 1, [fd]
        turn = self._free.pop()
        self._boxes[turn] = box
        return turn, [fd]
