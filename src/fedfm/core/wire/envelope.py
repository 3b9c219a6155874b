"""The frame around a payload in a message of Flower, and its size in bytes. Imports no torch."""

from __future__ import annotations

import functools

STYPE = "fedfm.packed"  # name of the encoding of a message's only array
CHUNK = 5 * 1024 * 1024  # Flower slices an array's bytes into chunks of this length


def _varint(n: int) -> int:
    return max((n.bit_length() + 6) // 7, 1)


def _object(kind: str, children: int, body: int) -> int:
    """Size of one object: "<kind> <child ids of 64 digits, comma-separated> <body length>", a zero byte, the body."""
    ids = children * 64 + max(children - 1, 0)
    return len(kind) + 1 + ids + 1 + len(str(body)) + 1 + body


@functools.lru_cache(maxsize=4096)
def envelope_size(head: int, data: int) -> int:
    """Size in bytes of a message in Flower's serialised records, from the lengths of its body's head and data.

    Flower stores equal chunks of one array once; this counts every chunk, so that the size does not depend on values.
    """
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
    text = 1 + _varint(head) + head  # protobuf: a value contains the string, and the item "json" contains the value
    item = 6 + 1 + _varint(text) + text
    total += _object("ConfigRecord", 0, 1 + _varint(item) + item)
    return total + _object("RecordDict", 2, len('{"data": "", "head": ""}') + 128)
