"""Send and read frames between the owner's process and its workers; a frame has a kind, and parts of given lengths."""

from __future__ import annotations

import struct
from typing import BinaryIO

from fedfm.errors import RunError

MODEL, JOB, ANSWER, FAULT, SPEND, REFRESH, RELEASE, SAVE, DONE, FAILED, BROKEN = range(11)
_HEAD = struct.Struct("<BQ")
SPENT = struct.Struct("<Id")  # number of ciphertexts, and statistical distance of each
_SIZE = struct.Struct("<Q")


def write(pipe: BinaryIO, kind: int, *parts: bytes) -> None:
    """Send one frame: its kind, and its parts with their sizes."""
    sizes = b"".join(_SIZE.pack(len(p)) for p in parts)
    pipe.write(_HEAD.pack(kind, len(parts)) + sizes)
    for part in parts:
        pipe.write(part)
    pipe.flush()


def read(pipe: BinaryIO) -> tuple[int, list[bytes]]:
    """Read the next frame; return its kind and its parts.

    Raises:
        EOFError: the other side has closed the pipe.
        RunError: the received bytes are not a frame.
    """
    kind, count = _HEAD.unpack(_exactly(pipe, _HEAD.size))
    if kind > BROKEN or count > 16:
        raise RunError("a process of the encrypted computation sent bytes that are not a frame")
    sizes = [_SIZE.unpack(_exactly(pipe, _SIZE.size))[0] for _ in range(count)]
    return kind, [_exactly(pipe, size) for size in sizes]


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) != size:
        raise EOFError
    return data
