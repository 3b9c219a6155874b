"""Convert requests and replies to records of Flower messages, and compute their sizes in bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.wire import flower_records, payload
from fedfm.core.wire.envelope import STYPE

CHUNK = 5 * 1024 * 1024  # Flower slices an array's bytes into chunks of this length


def to_record(value: Any) -> Any:
    """``value`` as a Flower RecordDict."""
    head, pieces = payload.encode(value)
    return flower_records.pack(head, b"".join(pieces))


def from_record(record: Any, hint: Any = Any, most: int | None = None) -> Any:
    """The value of a RecordDict made by :func:`to_record`, of at most ``most`` bytes of data.

    Raises:
        ClientFault: the record has another form, or the value does not fit ``hint``.
    """
    head, data = flower_records.unpack(record)
    return payload.decode(head, data, hint, most=most)


def envelope(round: int, call: int, body: Any) -> Mapping[str, Any]:
    """A message in either direction: the request's identity, and the payload or the reply's value."""
    return {"round": round, "call": call, "body": body}


def with_texts(head: str, more: Mapping[str, Sequence[str]]) -> str:
    """The head of an envelope with further entries: lists of texts, which need no data."""
    return head[:-2] + "," + payload.encode(more)[0].removeprefix('{"m":{')


def weigh(body: Any) -> int:
    """Bytes of a message with this body in Flower's serialised records, computed from structure and shapes.

    Flower stores equal chunks of one array once; this counts every chunk, so that the size does not depend on values.
    It is the same for every round and call.
    """
    return envelope_size(*payload.size(body))


def _varint(n: int) -> int:
    return max((n.bit_length() + 6) // 7, 1)


def _object(kind: str, children: int, body: int) -> int:
    """Bytes of one object: "<kind> <child ids of 64 digits, comma-separated> <body length>", a zero byte, the body."""
    ids = children * 64 + max(children - 1, 0)
    return len(kind) + 1 + ids + 1 + len(str(body)) + 1 + body


@functools.lru_cache(maxsize=4096)
def envelope_size(head: int, data: int) -> int:
    """As :func:`weigh`, for a body with these lengths of head and data."""
    head, data = len('{"m":{"round":"i","call":"i","body":}}') + head, 16 + data
    chunks = -(-data // CHUNK)
    # {"dtype": "uint8", "shape": [N], "stype": "fedfm.packed", "arraychunk_ids": [0, 1, ...]}
    indexes = sum(len(str(i)) for i in range(chunks)) + 2 * max(chunks - 1, 0)
    meta = (
        len('{"dtype": "uint8", "shape": [], "stype": "", "arraychunk_ids": []}')
        + len(str(data))
        + len(STYPE)
        + indexes
    )
    total = _object("Array", chunks, meta)
    for i in range(chunks):
        total += _object("ArrayChunk", 0, min(CHUNK, data - i * CHUNK))
    total += _object("ArrayRecord", 1, len('{"packed": ""}') + 64)
    text = 1 + _varint(head) + head  # protobuf: the string, in its value, in its item with the key "json"
    item = 6 + 1 + _varint(text) + text
    total += _object("ConfigRecord", 0, 1 + _varint(item) + item)
    return total + _object("RecordDict", 2, len('{"data": "", "head": ""}') + 128)
