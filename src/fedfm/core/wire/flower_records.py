"""Conversion between a payload (head and data) and Flower's records. Imports no torch.

A message is one ArrayRecord with one Array (the packed data) and one ConfigRecord (the head). So Flower
sends five objects, however many tensors there are.
"""

from __future__ import annotations

from typing import Any

from fedfm.core.wire.envelope import STYPE
from fedfm.errors import E_FORMAT, ClientFault

WIRE = 1  # version of the wire format; both sides must have the same


def pack(head: str, data: bytes) -> Any:
    """A Flower RecordDict."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = Array("uint8", (len(data),), STYPE, data)
    return RecordDict({"data": ArrayRecord({"packed": array}), "head": ConfigRecord({"json": head})})


def unpack(record: Any) -> tuple[str, bytes]:
    """Head and data of a RecordDict made by :func:`pack`, not decoded.

    Raises:
        ClientFault: the record has another form.
    """
    try:
        array, head = record["data"]["packed"], record["head"]["json"]
        stype, data = array.stype, array.data
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ClientFault(E_FORMAT, "the message is not a fedfm payload") from None
    if stype != STYPE or not isinstance(head, str) or not isinstance(data, bytes):
        raise ClientFault(E_FORMAT, "the message is not a fedfm payload")
    return head, data


def message_type(handler: str) -> str:
    """A request's handler as Flower's message type, whose categories are train, query and evaluate.

    Example:
        >>> message_type("train.FedAvg_train"), message_type("scores.Evaluation_evaluate")
        ('train.FedAvg_train', 'query.scores__Evaluation_evaluate')
    """
    kind, _, name = handler.partition(".")
    return handler if kind in ("train", "query") else f"query.{kind}__{name}"


def handler_of(message_type: str) -> str:
    """The handler of a Flower message: the inverse of :func:`message_type`.

    Example:
        >>> handler_of("query.scores__Evaluation_evaluate"), handler_of("query.FedPFT_summarise")
        ('scores.Evaluation_evaluate', 'query.FedPFT_summarise')
    """
    kind, inside, name = message_type.removeprefix("query.").partition("__")
    return f"{kind}.{name}" if inside and kind in ("aggregate", "scores", "reveal") else message_type
