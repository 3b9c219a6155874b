"""Conversion between requests, Flower messages and replies."""

from __future__ import annotations

from typing import Any, NamedTuple

from flwr.app import Message

from fedfm.core.messages import Reply, Request
from fedfm.core.wire import codec, flower_records
from fedfm.engines.answers import parse_envelope
from fedfm.engines.flower.private_api import client_fault
from fedfm.engines.flower.recovery import last_reply, parameter_cache
from fedfm.errors import E_FORMAT, ClientFault


def fault_reply(request: Request, fault: ClientFault) -> Reply:
    """A reply that reports a fault for this request."""
    return Reply(request.client, None, request.round, request.call, 0, 0, fault)


def reply_of(message: Message, sent: InFlight, most: int | None) -> tuple[Reply, frozenset[str]]:
    """Convert a Flower message to a Reply, and list the hashes of the parameters that the client has cached.

    An invalid message becomes a fault.
    """
    request, there = sent.request, frozenset[str]()
    fault, round, call = None, request.round, request.call
    try:
        if message.has_error():
            raise client_fault(message.error)
        if not message.has_content():
            raise ClientFault(E_FORMAT, "an empty message")
        value = codec.from_record(message.content, None, most)
        round, call, body, fault = parse_envelope(value)
        there = parameter_cache.names_in(value.get(parameter_cache.NAMES))
        if fault is None:
            return Reply(request.client, body, round, call, sent.nbytes, codec.weigh(body), spared=sent.spared), there
    except ClientFault as bad:
        fault = bad
    return Reply(request.client, None, round, call, sent.nbytes, 0, fault, sent.spared), there


class InFlight(NamedTuple):
    """A request in flight."""

    node: int
    request: Request
    nbytes: int  # bytes of the message with all its parameters
    spared: int  # how many of these bytes the client's cache saves
    since: str = ""  # when its node connected, according to the SuperLink
    name: str = ""  # name under which its client caches the reply, if replies are cached


class EncodedPayload:
    """Encodes a payload once in full, and once for each set of parameters that receivers have cached.

    Args:
        spare: whether any client has cached parameters.
        kept: whether clients cache their replies under the requests' names.
    """

    def __init__(self, request: Request, spare: bool, kept: bool = False) -> None:
        self._request, self.payload, self.nbytes = request, request.payload, codec.weigh(request.payload)
        self._known = parameter_cache.hashes(request.payload) if spare else {}
        self._kept = kept
        self._forms: dict[frozenset[str], tuple[Any, int, str]] = {}

    def without(self, there: frozenset[str]) -> tuple[Any, int, str]:
        """The record, the number of saved bytes, and the request's name, for a client that caches ``there``."""
        names = there & frozenset(self._known.values())
        if names not in self._forms:
            body = parameter_cache.with_references(self.payload, self._known, names) if names else self.payload
            record = codec.to_record(codec.envelope(self._request.round, self._request.call, body))
            name = last_reply.name_of(self._request.handler, *flower_records.unpack(record)) if self._kept else ""
            self._forms[names] = record, self.nbytes - codec.weigh(body), name
        return self._forms[names]
