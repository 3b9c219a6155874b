"""Convert bytes to tensors for messages, and values to bytes for storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.wire import payload


def of_bytes(data: bytes) -> Tensor:
    """Convert bytes to a tensor for a message, uint8 (n,)."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def to_bytes(tensor: Tensor | None) -> bytes:
    """Convert the tensor of :func:`of_bytes` back to bytes; None gives empty bytes."""
    return b"" if tensor is None else tensor.contiguous().numpy().tobytes()


def pack(value: Any) -> bytes:
    """Serialise a value of the wire format; :func:`unpack` is the inverse."""
    head, pieces = payload.encode(value)
    text = head.encode()
    return len(text).to_bytes(8, "little") + text + b"".join(pieces)


def unpack(data: bytes, hint: Any) -> Any:
    """Parse the bytes of :func:`pack`, and check the value against the type ``hint``."""
    end = 8 + int.from_bytes(data[:8], "little")
    body = np.frombuffer(bytearray(data[end:]), np.uint8)
    return payload.decode(data[8:end].decode(), body, hint, trusted=True)
