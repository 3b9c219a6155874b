"""Requests and replies as records of Flower's messages, and their sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.wire import payload
from fedfm.core.wire.envelope import envelope_size


def to_record(value: Any) -> Any:
    """``value`` as a Flower RecordDict."""
    from fedfm.core.wire import flower_records

    head, pieces = payload.encode(value)
    return flower_records.pack(head, b"".join(pieces))


def from_record(record: Any, hint: Any = Any, most: int | None = None) -> Any:
    """The value of a RecordDict made by :func:`to_record`; its data may have at most ``most`` bytes.

    Raises:
        ClientFault: the record has another form, or the value does not fit ``hint``.
    """
    from fedfm.core.wire import flower_records

    head, data = flower_records.unpack(record)
    return payload.decode(head, data, hint, most=most)


def envelope(round: int, call: int, body: Any) -> Mapping[str, Any]:
    """A message in either direction: round and call of the request, and the request's payload or the reply's value."""
    return {"round": round, "call": call, "body": body}


def with_texts(head: str, more: Mapping[str, Sequence[str]]) -> str:
    """Add entries to the head of an envelope: lists of texts, which need no data."""
    return head[:-2] + "," + payload.encode(more)[0].removeprefix('{"m":{')


def weigh(body: Any) -> int:
    """Size in bytes of a message with this body in Flower's serialised records, from structure and shapes alone.

    The size is the same for every round and call, see :func:`fedfm.core.wire.envelope.envelope_size`.
    """
    return envelope_size(*payload.size(body))
