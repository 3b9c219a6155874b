"""What a FlowerLink sends and gets: a payload's records, a message on its way, and a message as a Reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flwr.app import Message

from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec
from fedfm.engines.flower import held
from fedfm.engines.flower.private_api import client_fault
from fedfm.errors import E_CLIENT, E_DUPLICATE, E_EXCEPTION, E_FORMAT, E_READONLY, ClientFault


def reply_of(message: Message, sent: Underway, most: int | None) -> tuple[Reply, frozenset[str]]:
    """A Flower message as a Reply, and what its site holds; an invalid message becomes a fault."""
    request, there = sent.request, frozenset[str]()
    fault, round, call = None, request.round, request.call
    try:
        if message.has_error():
            raise client_fault(message.error)
        if not message.has_content():
            raise ClientFault(E_FORMAT, "an empty message")
        value = codec.from_record(message.content, None, most)
        if not isinstance(value, Mapping) or not {"round", "call"} < value.keys():
            raise ClientFault(E_FORMAT, "the reply is not an envelope")
        if type(value["round"]) is not int or type(value["call"]) is not int:
            raise ClientFault(E_FORMAT, "the reply's round and call are not whole numbers")
        round, call, there = value["round"], value["call"], held.named(value.get(held.NAMES))
        if "fault" in value:
            fault = _told(value["fault"])
        elif "body" not in value:
            raise ClientFault(E_FORMAT, "the reply has no body")
        else:
            up = codec.weigh(value["body"])
            return Reply(request.client, value["body"], round, call, sent.nbytes, up, spared=sent.spared), there
    except ClientFault as bad:
        fault = bad
    return Reply(request.client, None, round, call, sent.nbytes, 0, fault, sent.spared), there


class Underway(NamedTuple):
    """A request on its way."""

    node: int
    request: Request
    nbytes: int  # with all its parameters
    spared: int  # of these, how many do not cross
    since: str = ""  # when its node connected, as the SuperLink writes it


class EncodedPayload:
    """A payload in the forms in which it is sent: whole, and without what a site holds."""

    def __init__(self, request: Request, spare: bool) -> None:
        self._request, self.payload, self.nbytes = request, request.payload, codec.weigh(request.payload)
        self._known = held.hashes(request.payload) if spare else {}
        self._forms: dict[frozenset[str], tuple[Any, int]] = {}

    def without(self, there: frozenset[str]) -> tuple[Any, int]:
        """(record, spared bytes) for a site where these parameters are."""
        names = there & frozenset(self._known.values())
        if names not in self._forms:
            body = held.shortened(self.payload, self._known, names) if names else self.payload
            record = codec.to_record(codec.envelope(self._request.round, self._request.call, body))
            self._forms[names] = record, self.nbytes - codec.weigh(body)
        return self._forms[names]


def _told(value: Any) -> ClientFault:
    """The fault that a site reports."""
    code, reason = (value.get("code"), value.get("reason")) if isinstance(value, Mapping) else (None, None)
    if not isinstance(code, str) or not isinstance(reason, str):
        return ClientFault(E_FORMAT, "the reply's fault is not one")
    # Only the server itself can find these three: a second reply, a foreign reply, a write to shared memory.
    if not code.startswith("E_") or len(code) > 20 or code in (E_READONLY, E_DUPLICATE, E_CLIENT):
        code = E_EXCEPTION
    return ClientFault(code, reason[:400])
