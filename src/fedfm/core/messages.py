"""Messages between the server and its clients, from an engine's view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedfm.core.client import ClientId
from fedfm.errors import ClientFault


class Request(NamedTuple):
    """One message to one client: a call of ``handler`` (kind and name, as in ``train.FedAvg_train``) with ``payload``.

    (round, call) identifies the request: the reply repeats this pair, and the client's memory has a version for each.
    """

    client: ClientId
    handler: str
    payload: Mapping[str, Any]
    round: int
    call: int


class Reply(NamedTuple):
    """A client's reply: a value, or a fault instead.

    Attributes:
        nbytes_down, nbytes_up: size of request and reply in Flower's serialised records.
        spared: bytes saved: the part of the request that was not sent, since the client had it already.
    """

    client: ClientId
    value: Any
    round: int
    call: int
    nbytes_down: int = 0
    nbytes_up: int = 0
    fault: ClientFault | None = None
    spared: int = 0


class Link(Protocol):
    """An engine from the server's view: it delivers requests and yields replies in the order of their arrival."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """Names of the clients, sorted."""

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver requests; yield at most one reply to each, in any order; late replies are not yielded."""


@runtime_checkable
class Streaming(Link, Protocol):
    """An engine on which clients may answer later than in the call that asks them."""

    streams: bool  # whether the run lets clients answer later

    @property
    def requests_in_flight(self) -> Mapping[ClientId, tuple[int, int]]:
        """(round, call) of the requests of :meth:`stream` whose replies have not been yielded."""

    def restore(self, awaited: Mapping[ClientId, tuple[int, int]]) -> None:
        """Wait for the replies to these requests of an earlier process.

        The next :meth:`stream` gets a new request for each of these clients, and sends it if the old one is lost.
        """

    def stream(self, requests: Sequence[Request], again: Callable[[ClientId], Request]) -> Iterator[Reply]:
        """Deliver requests; yield replies to these and to earlier requests of this kind, as they arrive.

        The link yields one reply per client, until no request is in flight. If a reply answers an earlier request
        than ``again(name)``, the client gets this new request at once, while other requests are in flight.
        """


ROUND, SCORES, REVEAL = "round", "scores", "reveal"  # parts of a run from which a client can be left out
MISSING = {
    ROUND: "left out",
    SCORES: "left out of the scores",
    REVEAL: "left out of the clients' own models",
}


@dataclass(frozen=True)
class Excluded:
    """A client left out of a round, and the reason.

    Attributes:
        part: the part from which it is left out: the round, or only its ``scores`` or its own model (``reveal``).
    """

    round: int
    client: ClientId
    code: str
    reason: str
    part: str = ROUND

    def __str__(self) -> str:
        return f"round {self.round}: {self.client} {MISSING[self.part]}, {self.code}: {self.reason}"
