"""Buffered asynchronous rounds (FedBuff): each server update uses the first updates that arrive.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated Learning with Buffered Asynchronous Aggregation.
AISTATS 2022, arXiv:2106.06639, Algorithm 1. A round is one server update, from a buffer of K updates Delta_i of clients
that began tau_i server updates ago:

    w <- w + (1 / K) sum_i s(tau_i) Delta_i,   s(tau) = (1 + tau)^(-1/2).

With weights by numbers of rows, the sum is sum_i n_i s(tau_i) Delta_i / sum_i n_i. After its answer a client starts
again at once with the newest model. If it has just trained the newest model, it waits for the next model, so that no
client is in a buffer twice. If K is the number of clients, every round is a round of FedAvg.

A deployment takes updates in the order in which they arrive. Other engines simulate a clock, so that a run always has
the same bits: a local training takes the time |N(0, 1)| divided by the client's speed, as in the paper's simulations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fedfm import seeds
from fedfm.aggregation.base import Aggregator, Half, Of, Payload, Transport
from fedfm.core import update_metrics
from fedfm.core.checks import match
from fedfm.core.client import ClientId, Update, action, each
from fedfm.core.federation import Federation
from fedfm.linalg.params import Layout

Check = Callable[[ClientId, Update], None]

# Keys in the server's memory. Their values are: for each client [end of its training, round in which it began]; for
# each round the payload that was sent; the simulated times of asynchronous and of synchronous rounds so far.
_IN_FLIGHT, _SENT, _CLOCKS = "asynchronous.underway", "asynchronous.sent", "asynchronous.clocks"


@dataclass(frozen=True)
class Buffered(Transport):
    """Takes updates as they arrive, and scales them by their age.

    Attributes:
        buffer: K, number of updates that a server update uses.
        staleness: the exponent a in s(tau) = (1 + tau)^(-a).
        speeds: relative speed of each client, only for the simulated clock.
    """

    figures: ClassVar[tuple[str, ...]] = ("clock", "synchronous_clock", "staleness", "largest_staleness")

    buffer: int
    staleness: float = 0.5
    speeds: Mapping[str, float] = field(default_factory=dict)

    def scale(self, tau: int) -> float:
        """s(tau)."""
        return float((1 + tau) ** -self.staleness)

    def duration(self, seed: int, client: ClientId, t: int) -> float:
        """Simulated time of the local training that a client begins in round t."""
        draw = seeds.generator(seed, "server", "arrival", client, t).standard_normal()
        return float(abs(draw)) / self.speeds.get(client, 1.0)

    def _discount(self, update: Update, tau: int) -> Update:
        """The update multiplied by s(tau); its weight n_i and integers (e.g. counts of batches) do not change."""
        s = self.scale(tau)
        return replace(update, delta=update.delta.map(lambda x: s * x if x.is_floating_point() else x))

    def updates(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Iterator[Update]:
        """Server half: the updates of the next buffer, in order of the clients' names."""

        def check(client: ClientId, update: Update) -> None:
            match(update.delta, like, "delta")

        means, ages = update_metrics.Means(), list[int]()
        arrivals = self._arriving if fed.streams else self._simulate
        for began, update in arrivals(fed, handler, payload, check):
            tau = fed.round - began
            ages.append(tau)
            means.add(update)
            yield self._discount(update, tau) if tau else update
        fed.metrics.update(means.means())
        if ages:
            fed.metrics |= {"staleness": sum(ages) / len(ages), "largest_staleness": float(max(ages))}

    def _arriving(self, fed: Federation, handler: Half, payload: Payload, check: Check) -> Iterator[tuple[int, Update]]:
        """The first K clients that answer: for each, the round in which it began, and its update."""
        idle = [client for client in fed.clients if client not in fed.in_flight]
        first = fed.exchange(
            "train", handler, idle, payload, self.wire_type, form=self.form, check=check, first=self.buffer
        )
        for client, update in first:
            yield fed.began[client], update

    def _simulate(self, fed: Federation, handler: Half, payload: Payload, check: Check) -> Iterator[tuple[int, Update]]:
        """The first K clients that finish on the simulated clock: for each, the round in which it began, and its
        update.

        If a client fails, the next one takes its place, as in a deployment. The run's seed determines clock and order.
        """
        clock, synchronous = fed.memory.get(_CLOCKS, [0.0, 0.0])
        simulated = dict(fed.memory.get(_IN_FLIGHT, {}))
        sent = {**fed.memory.get(_SENT, {}), str(fed.round): dict(payload)}
        took = {client: self.duration(fed.seed, client, fed.round) for client in fed.clients}
        for client in fed.clients:
            if client not in simulated:
                simulated[client] = [clock + took[client], fed.round]
        queue = sorted(simulated, key=lambda client: (simulated[client][0], client))
        before, cohort, start, taken = len(fed.excluded), list[ClientId](), clock, dict[ClientId, Any]()
        while queue and len(cohort) < self.buffer:
            places = self.buffer - len(cohort)
            due, queue = sorted(queue[:places]), queue[places:]
            ended = {client: simulated.pop(client) for client in due}
            clock = max(clock, *(end for end, _ in ended.values()))
            taken |= ended
            began = {client: t for client, (_, t) in ended.items()}
            now = payload
            if set(began.values()) != {fed.round}:
                now = {key: each({c: sent[str(t)][key] for c, t in began.items()}) for key in payload}
            for client, update in fed.exchange(
                "train", handler, due, now, self.wire_type, form=self.form, check=check, least=0
            ):
                cohort.append(client)
                yield began[client], update
        for client in sorted(cohort, key=lambda client: (taken[client][0], client))[:-1]:
            end, t = taken[client]
            if t < fed.round:  # the client received this round's model while the server waited for the last client
                simulated[client] = [max(start, end) + took[client], fed.round]
        fed.cohort, fed.heard = tuple(sorted(cohort)), len(cohort)
        fed.suffice(len(cohort), self.buffer, f"train.{action(handler)}", before)
        needed = {str(t) for _, t in simulated.values()}
        clocks = [clock, synchronous + max(took.values())]
        fed.memory[_IN_FLIGHT], fed.memory[_CLOCKS] = simulated, clocks
        fed.memory[_SENT] = {t: value for t, value in sent.items() if t in needed}
        fed.metrics |= dict(zip(self.figures, clocks, strict=False))


def with_buffer(aggregation: Aggregator, buffer: int, staleness: float, speeds: Mapping[str, float]) -> Aggregator:
    """A copy of the aggregation that works in buffered asynchronous rounds."""
    late: Any = copy.copy(aggregation)
    object.__setattr__(late, "transport", Buffered(buffer, staleness, speeds))
    return late  # type: ignore[no-any-return]
