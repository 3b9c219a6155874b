"""Encode trained values in fewer bytes in every message, in both directions (``run.transport``).

A :class:`Coding` replaces each Params of a payload or a reply by its coded form (:mod:`fedfm.linalg.quantised`), and
rebuilds it at the receiver. Other tensors (statistics, features, logits) are not changed. Both sides have w_0, the
model's parameters before the first round, so a tensor near w_0 is sent as its difference from w_0.
The server encodes in :class:`CodedLink`, the clients in ``runtime.client``. So engines see ordinary values, whose bits
and sizes are the same on every engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fedfm.core.checks import conform
from fedfm.core.client import ClientId
from fedfm.core.messages import Link, Reply, Request, Streaming
from fedfm.errors import E_FORMAT, E_NONFINITE, E_VERSION, ClientFault
from fedfm.linalg.params import Params
from fedfm.linalg.precisions import EXACT
from fedfm.linalg.quantised import CODES, Coded, Error, can_code, code, decode

if TYPE_CHECKING:
    from fedfm.models.model import Model

KEY = "+coded"  # the only key of a mapping that replaces a Params
_METHODS = ("train.", "query.", "aggregate.")  # kinds of the method's own messages, whose coding errors are recorded

_starts: WeakKeyDictionary[Any, Params] = WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class _Sent:
    """The value of :data:`KEY` in a message.

    Attributes:
        start: the first digits of the hash of w_0; differences are taken from w_0.
        largest, squares: largest error and sum of squared errors of the sender's coding.
    """

    values: Params
    relative: str
    start: str
    largest: float
    squares: float


class Coding:
    """Encodes and rebuilds the Params in values.

    Args:
        precision: ``bfloat16`` or ``int8``.
        model: this side's model, with its parameters before the first round.
    """

    def __init__(self, precision: str, model: Model) -> None:
        if model not in _starts:
            _starts[model] = model.params()
        self.precision, self._start = precision, _starts[model]
        self._print = self._start.sha256()[:16]

    def encode(self, value: Any, report: Callable[[Error], None] = lambda error: None) -> Any:
        """The value with coded Params; ``report`` is called with the coding error of each Params."""
        return replace_parts(value, lambda x: self._encode(x, report) if isinstance(x, Params) else None)

    def rebuild(self, value: Any, report: Callable[[Error], None] = lambda error: None) -> Any:
        """The inverse of :meth:`encode`; a value without coded Params is returned unchanged.

        Raises:
            ClientFault: E_FORMAT, a coded form is malformed; E_VERSION, the other side started from another w_0;
                E_NONFINITE, a coded form has NaN or infinity.
        """
        return replace_parts(value, lambda x: self._rebuild(x, report) if _is_coded(x) else None)

    def _encode(self, x: Params, report: Callable[[Error], None]) -> Any:
        if not can_code(x.layout):
            return x
        found: Coded = code(x, self.precision, self._start)
        report(found.error)
        error = found.error
        return {KEY: _Sent(found.values, found.relative, self._print, error.largest, error.squares)}

    def _rebuild(self, x: Mapping[str, Any], report: Callable[[Error], None]) -> Params:
        try:
            sent: _Sent = conform(x[KEY], _Sent, KEY)
        except ClientFault as fault:
            if fault.code != E_NONFINITE:
                raise
            # The same text on all engines, some of which check the values earlier.
            raise ClientFault(E_NONFINITE, "coded parameters have NaN or infinity") from None
        if "1" in sent.relative and sent.start != self._print:
            raise ClientFault(E_VERSION, "coded parameters are differences from weights that this side does not have")
        try:
            found = decode(sent.values, sent.relative, self._start)
        except ValueError as error:
            raise ClientFault(E_FORMAT, str(error)) from None
        report(Error(sent.largest, sent.squares, sum(sent.values.layout.sizes.get(kind, 0) for kind in CODES.values())))
        return found


_Coder = Callable[[Request], Request]


class CodedLink:
    """A link whose messages are coded: the server's half.

    Attributes:
        down, up: coding errors of the method's own messages since the last call of :meth:`errors`.
    """

    def __init__(self, link: Link, coding: Coding) -> None:
        self._link, self._coding = link, coding
        self.down, self.up = Error(), Error()

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._link.clients

    @property
    def streams(self) -> bool:
        """Whether clients may answer in a later call."""
        return isinstance(self._link, Streaming) and self._link.streams

    @property
    def requests_in_flight(self) -> Mapping[ClientId, tuple[int, int]]:
        return self._link.requests_in_flight if isinstance(self._link, Streaming) else {}

    def restore(self, awaited: Mapping[ClientId, tuple[int, int]]) -> None:
        if isinstance(self._link, Streaming):
            self._link.restore(awaited)

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        own = requests[0].handler.startswith(_METHODS)
        yield from self._through(lambda of: self._link.exchange([of(request) for request in requests]), own)

    def stream(self, requests: Sequence[Request], again: Callable[[ClientId], Request]) -> Iterator[Reply]:
        """As the link's ``stream``; all its messages are the method's own."""
        if not isinstance(self._link, Streaming):
            raise RuntimeError("on this engine clients answer in the call that asks them")
        stream = self._link.stream
        yield from self._through(lambda of: stream([of(r) for r in requests], lambda client: of(again(client))), True)

    def _through(self, deliver: Callable[[_Coder], Iterator[Reply]], own: bool) -> Iterator[Reply]:
        kept: dict[int, tuple[Any, Any]] = {}  # a value for several clients is coded once: id -> (value, coded)

        def once(value: Any) -> Any:
            if id(value) not in kept:
                kept[id(value)] = value, self._coding.encode(value, self.down.add if own else _nothing)
            return kept[id(value)][1]

        def of(request: Request) -> Request:
            if id(request.payload) not in kept:
                payload = {key: once(value) for key, value in request.payload.items()}
                kept[id(request.payload)] = request.payload, payload
            return request._replace(payload=kept[id(request.payload)][1])

        for reply in deliver(of):
            try:
                value = self._coding.rebuild(reply.value, self.up.add if own else _nothing)
            except ClientFault as fault:
                yield reply._replace(value=None, fault=fault)
            else:
                yield reply._replace(value=value)

    def errors(self) -> dict[str, Any]:
        """The errors since the last call, by direction, as JSON values."""
        found, self.down, self.up = {"down": error_record(self.down), "up": error_record(self.up)}, Error(), Error()
        return found


def link_of(link: Link, precision: str, model: Model) -> Link:
    """The link itself if ``precision`` is exact; else a link that codes its messages."""
    return link if precision == EXACT else CodedLink(link, Coding(precision, model))


def error_record(error: Error) -> dict[str, Any]:
    """An error as JSON values."""
    return {"largest": error.largest, "rms": error.rms, "values": error.count}


def over_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the errors of several rounds, each from :meth:`CodedLink.errors`."""
    found = {}
    for way in ("down", "up"):
        total = Error()
        for line in rounds:
            count = line[way]["values"]
            total.add(Error(line[way]["largest"], line[way]["rms"] ** 2 * count, count))
        found[way] = error_record(total)
    return found


def _nothing(error: Error) -> None:
    """Ignore the coding error of a message that is not the method's own."""


def _is_coded(x: Any) -> bool:
    return isinstance(x, Mapping) and not isinstance(x, Params) and x.keys() == {KEY}


def replace_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Replace parts of a value: ``change`` returns the new part, or None to descend into the part."""
    if (new := change(value)) is not None:
        return new
    if isinstance(value, Params):
        return value
    if isinstance(value, Mapping):
        parts = {key: replace_parts(part, change) for key, part in value.items()}
        return parts if any(parts[key] is not value[key] for key in parts) else value
    if isinstance(value, (list, tuple)):
        items = [part if isinstance(part, (int, float, str)) else replace_parts(part, change) for part in value]
        changed = any(a is not b for a, b in zip(items, value, strict=True))
        return (tuple(items) if isinstance(value, tuple) else items) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        news = {name: replace_parts(part, change) for name, part in fields.items()}
        other = {name: new for name, new in news.items() if new is not fields[name]}
        return dataclasses.replace(value, **other) if other else value
    return value
