"""Run a method in this process, with a recorder at the server, for replays and shadow runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedfm.aggregation.base import Aggregator
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.messages import Link, Reply, Request
from fedfm.core.method import Method
from fedfm.core.transport import link_of
from fedfm.engines.local.engine import LocalLink
from fedfm.errors import ClientFault
from fedfm.linalg.precisions import EXACT
from fedfm.models.model import Model
from fedfm.runtime.client import Population, Silos
from fedfm.runtime.client_memory import secret

if TYPE_CHECKING:
    from fedfm.attacks.attackers import Attackers


@dataclass(frozen=True)
class RecordedReply:
    """A reply, as the server received it.

    Attributes:
        call: number of the call in the round, from 1; (round, call) is one request to several clients.
        handler: e.g. ``query.FedPFT_summarise``.
    """

    round: int
    call: int
    handler: str
    client: ClientId
    value: Any


@dataclass(frozen=True)
class Turn:
    """A round of the replay.

    Attributes:
        round: number of the round; 0 is ``init``.
        before, after: the server's state before and after the round; equal in round 0.
        replies: replies of the clients.
        payloads: for each client, the payload of the round's first call; empty if the round has no call.
    """

    round: int
    before: Any
    after: Any
    replies: Sequence[RecordedReply]
    payloads: Mapping[ClientId, Mapping[str, Any]]


class _Recorder:
    """A link that keeps a round's messages; it excludes the clients that the run excluded."""

    def __init__(self, link: Link, excluded: Mapping[tuple[int, ClientId], ClientFault]) -> None:
        self._link, self._excluded = link, excluded
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self.replies: list[RecordedReply] = []
        self.payloads: dict[ClientId, Mapping[str, Any]] = {}

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._link.clients

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        handlers = {request.client: request.handler for request in requests}
        if not self.payloads:
            self.payloads = {request.client: request.payload for request in requests}
        for reply in self._link.exchange(requests):
            fault = self._excluded.get((reply.round, reply.client))
            if fault is not None:
                yield reply._replace(value=None, fault=fault)
                continue
            if reply.fault is None:
                self.replies.append(
                    RecordedReply(reply.round, reply.call, handlers[reply.client], reply.client, reply.value)
                )
            yield reply


class PopulationWithModel(Population, Protocol):
    """The clients' data, and the server's model."""

    @property
    def model(self) -> Model:
        """The model of the method's server half."""


class RecordedRun:
    """A run of a method in this process, with a recorder at the server.

    Args:
        population: the clients' data, and the server's model.
        private: folder for secrets and clients' memories.
        excluded: for each (round, client), the fault for which the client is excluded from the round.
        transport: precision of the Params in messages, as in ``run.transport``.

    Attributes:
        fed: the federation.
    """

    def __init__(
        self,
        method: Method[Any],
        population: PopulationWithModel,
        private: Path,
        *,
        seed: int,
        min_clients: int | None = 1,
        excluded: Mapping[tuple[int, ClientId], ClientFault] | None = None,
        aggregator: Aggregator | None = None,
        attack: Attackers | None = None,
        transport: str = EXACT,
    ) -> None:
        aggregator, memory = aggregator or Aggregator(), private / "memory"
        silos = Silos(method, aggregator, population, memory=memory, seed=seed, attack=attack, transport=transport)
        self._method = method
        self._recorder = _Recorder(link_of(LocalLink(silos), transport, population.model), excluded or {})
        self.fed = Federation(
            self._recorder,
            model=population.model,
            aggregator=aggregator,
            seed=seed,
            min_clients=min_clients,
            secret=partial(secret, private, "server"),
        )

    def turns(self, rounds: int) -> Iterator[Turn]:
        """Run rounds 0 to ``rounds``, and yield each."""
        before = None
        for t in range(rounds + 1):
            self._recorder.begin()
            self.fed.begin(t)
            state = self._method.step(self.fed, before, t) if t else self._method.init(self.fed)
            yield Turn(t, before if t else state, state, self._recorder.replies, self._recorder.payloads)
            before = state
