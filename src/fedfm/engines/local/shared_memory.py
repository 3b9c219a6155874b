"""Anonymous memory files shared by processes of one machine: payloads for all workers, and the replies of a chunk.

A control message carries the file's descriptor, and tensors are views of the file, which is mapped copy-on-write.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedfm.core.messages import Request
from fedfm.core.wire import codec, payload

_LINE = 64  # data begin at a multiple of this, so that tensors can be views of them


class Payloads:
    """The payloads of one exchange, each encoded once into a memory file.

    A payload of a single request is removed when that is answered.

    Attributes:
        files: descriptors by the payload's number; -1 if the file is closed.
        heads: number of bytes of each head, at the beginning of its file.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._uses = Counter(id(request.payload) for request in requests)
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps each id unique
        self.files: list[int] = []
        self.heads: list[int] = []
        self._nbytes: list[int] = []

    def number(self, request: Request) -> int:
        """Number of its payload; encodes a new payload."""
        key = id(request.payload)
        if key not in self._numbers:
            self._numbers[key] = len(self.files)
            self._kept.append(request.payload)
            head, pieces = payload.encode(request.payload)
            self.files.append(write(laid_out(0, head, pieces)))
            self.heads.append(len(head))
            self._nbytes.append(codec.enveloped(len(head), sum(map(len, pieces))))
        return self._numbers[key]

    def once(self, request: Request) -> bool:
        """Whether no other request has this payload."""
        return self._uses[id(request.payload)] == 1

    def answered(self, request: Request) -> None:
        """Remove its payload unless another request has it."""
        number = self._numbers[id(request.payload)]
        if self.once(request) and self.files[number] >= 0:
            os.close(self.files[number])
            self.files[number] = -1

    def nbytes(self, request: Request) -> int:
        """Size of its message on Flower's wire."""
        return self._nbytes[self._numbers[id(request.payload)]]

    def close(self) -> None:
        for fd in self.files:
            if fd >= 0:
                os.close(fd)


def write(pieces: Sequence[bytes | memoryview]) -> int:
    """A new memory file with these pieces."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("fedfm", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as unnamed:
            fd = os.dup(unnamed.fileno())
    with os.fdopen(os.dup(fd), "wb", buffering=1 << 20) as file:
        for piece in pieces:
            file.write(piece)
        if not any(map(len, pieces)):
            file.write(b"\0")  # an empty file cannot be mapped
    return fd


def laid_out(at: int, head: str, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Pieces of a message in a file from ``at`` on: its head, a gap, its data."""
    text = head.encode()
    return [text, bytes(data_at(at, len(text)) - at - len(text)), *pieces]


def data_at(at: int, head: int) -> int:
    """Start of the data of a message that begins at ``at`` with a head of ``head`` bytes."""
    return -(-(at + head) // _LINE) * _LINE


def message(block: np.ndarray, at: int, head: int, data: int) -> Any:
    """The unchecked value of a message that begins at ``at``; its tensors are views of ``block``.

    Raises:
        ClientFault: it is malformed.
    """
    begin = data_at(at, head)
    return payload.decode(str(block[at : at + head].data, "utf-8"), block[begin : begin + data], None)


def mapped(fd: int) -> np.ndarray:
    """The file's bytes (n,), mapped copy-on-write; closes the descriptor."""
    try:
        # Python's mmap would keep a descriptor open for each of possibly a thousand replies.
        size = os.fstat(fd).st_size
        return torch.from_file(f"/dev/fd/{fd}", shared=False, size=size, dtype=torch.uint8).numpy()
    finally:
        os.close(fd)
