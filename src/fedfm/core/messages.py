"""Messages between the server and its clients, as an engine sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fedfm.core.client import ClientId
from fedfm.errors import ClientFault


class Request(NamedTuple):
    """One message to one client: call ``handler``, a kind and a wire name (``train.FedAvg_train``), with ``payload``.

    (round, call) identifies the request: the reply repeats it, and it versions the client's memory.
    """

    client: ClientId
    handler: str
    payload: Mapping[str, Any]
    round: int
    call: int


class Reply(NamedTuple):
    """A client's reply: a value, or a fault instead.

    Attributes:
        nbytes_down, nbytes_up: size of request and reply as Flower serialises their records.
        spared: bytes of the request that did not cross, since the client held that part.
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
    """An engine, as the server sees it: it delivers requests and yields replies in the order of their arrival."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """Names of the clients, sorted."""

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver; yield at most one reply per request, in any order; late replies are not yielded."""


@runtime_checkable
class Streaming(Link, Protocol):
    """An engine on which clients may answer later than in the call that asks them."""

    streams: bool  # whether it is used so

    @property
    def requests_in_flight(self) -> Mapping[ClientId, tuple[int, int]]:
        """(round, call) of the requests of :meth:`stream` whose replies have not been yielded."""

    def restore(self, awaited: Mapping[ClientId, tuple[int, int]]) -> None:
        """Wait for these requests of a process before this one.

        The next :meth:`stream` gets a request for each of their clients, to deliver if nothing is known of the former
        one.
        """

    def stream(self, requests: Sequence[Request], again: Callable[[ClientId], Request]) -> Iterator[Reply]:
        """Deliver; yield replies to these and to earlier requests of this kind as they arrive, one a client, while any
        is awaited. A client that has answered an earlier one gets ``again`` of its name while others are waited for.
        """


ROUND, SCORES, REVEAL = "round", "scores", "reveal"  # what a client is left out of
MISSING = {
    ROUND: "left out",
    SCORES: "left out of the scores",
    REVEAL: "left out of the models of clients' own",
}


@dataclass(frozen=True)
class Excluded:
    """A client left out of a round, and the reason.

    Attributes:
        part: what it is left out of: the round, or only its ``scores`` or its own model (``reveal``).
    """

    round: int
    client: ClientId
    code: str
    reason: str
    part: str = ROUND

    def __str__(self) -> str:
        return f"round {self.round}: {self.client} {MISSING[self.part]}, {self.code}: {self.reason}"
