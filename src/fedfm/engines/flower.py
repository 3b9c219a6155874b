"""What we use of Flower that is not public API (flwr 1.41), all in this module, and messages over its wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from fedfm import codec
from fedfm.errors import ClientFault
from fedfm.federation import Request
from fedfm.silo import Silos


def round_trip(record: Any) -> Any:
    """A RecordDict as the other side of Flower's network gets it: cut into objects, serialised, put together again."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    with no_object_id_recompute():
        name = record.object_id
        contents = {key: item.deflate() for key, item in get_all_nested_objects(record).items()}
    return inflate_object_from_contents(name, contents)


def serialised_nbytes(record: Any) -> int:
    """Bytes of a RecordDict as Flower serialises it (equal objects once): what :func:`codec.nbytes` computes."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, no_object_id_recompute

    with no_object_id_recompute():
        return sum(len(item.deflate()) for item in get_all_nested_objects(record).values())


def over_the_wire(silos: Silos, requests: Sequence[Request]) -> list[Any]:
    """Answer requests as a network engine would: payloads and replies are serialised and rebuilt."""
    delivered = []
    for request in requests:
        record = round_trip(codec.to_record(codec.envelope(request.round, request.call, request.payload)))
        body = codec.from_record(record, None)["body"]
        payload = silos.conform(request.handler, body)
        delivered.append(Request(request.client, request.handler, payload, request.round, request.call))
    values = silos.answer(delivered)
    return [
        v
        if isinstance(v, ClientFault)
        else codec.from_record(round_trip(codec.to_record(codec.envelope(r.round, r.call, v))), None)["body"]
        for r, v in zip(requests, values, strict=True)
    ]


@contextlib.contextmanager
def identity(run_id: int = 1) -> Iterator[None]:
    """Flower's Message asks who it belongs to; outside of its own processes nobody has said."""
    from flwr.supercore.task_identity import TaskIdentity

    saved = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, run_id, 1
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = saved
