"""Order of clients in a decentralised run, and the messages from each client to its successors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedfm.core import update_metrics
from fedfm.core.client import ClientId, each
from fedfm.core.federation import Federation
from fedfm.errors import E_SHAPE, ClientFault, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods._convergence import tell
from fedfm.methods.fedpft.summary import Summary


@dataclass(frozen=True)
class ForwardedSummary:
    """A client's message to its successors: a summary, and the names of the clients whose rows are in it."""

    origins: list[str]
    summary: Summary


@dataclass(frozen=True)
class PeerReply:
    """A client's reply in a decentralised run: a summary for its successors, its own head, and metrics of the fit."""

    summary: Summary
    head: Params
    metrics: dict[str, float]

    def __post_init__(self) -> None:
        update_metrics.check(self.metrics)


def carry(
    fed: Federation, handler: Any, parents: Mapping[ClientId, Sequence[ClientId]], check: Callable[[Summary], None]
) -> tuple[dict[ClientId, ForwardedSummary], dict[ClientId, Params], list[str]]:
    """Ask each client after its parents have answered, and send it the parents' messages.

    Returns:
        Each client's message, each client's head, and a line for each summary that was dropped because it would count a
        client's rows twice.

    Raises:
        RunError: too few clients sent a message, see :meth:`Federation.enough`.
    """

    def both(passed: PeerReply) -> None:
        check(passed.summary)
        if passed.head.layout is not fed.model.layout:
            raise ClientFault(E_SHAPE, "a head of another shape")

    sent: dict[ClientId, ForwardedSummary] = {}
    heads: dict[ClientId, Params] = {}
    dropped = []
    for client in topological(parents):
        handed: list[ForwardedSummary] = []
        for h in sorted((sent[p] for p in parents[client] if p in sent), key=lambda h: -sum(h.summary.counts)):
            if any(set(h.origins) & set(other.origins) for other in handed):
                dropped.append(f"{client}: the summary of {h.origins[-1]}, which counts a client's rows twice")
            else:
                handed.append(h)
        replies = fed.ask(handler, of=[client], check=both, least=0, received=each({client: handed}))
        if client not in replies:
            continue  # excluded, with a reason; its successors continue without it
        tell(fed, client, replies[client].metrics)
        origins = [o for h in handed for o in h.origins] + [client]
        sent[client], heads[client] = ForwardedSummary(origins, replies[client].summary), replies[client].head
    if len(sent) < (needed := max(fed.enough(len(parents)), 1)):
        raise RunError(f"{len(sent)} of {len(parents)} clients sent a summary, {needed} are needed (run.min_clients)")
    return sent, heads, dropped


def parents_of(
    topology: str, edges: Sequence[Sequence[str]], clients: Sequence[ClientId]
) -> dict[ClientId, list[ClientId]]:
    """For each client, the clients that send to it.

    A ring is run as a chain: an edge from the last client to the first would count the first client's rows twice.

    Raises:
        InputError: an edge names an unknown client.
    """
    if topology in ("chain", "ring"):
        return {c: list(clients[i - 1 : i]) if i else [] for i, c in enumerate(clients)}
    parents: dict[ClientId, list[ClientId]] = {c: [] for c in clients}
    for edge in edges:
        for name in edge:
            if name not in parents:
                raise InputError(
                    f'method.edges: "{name}" is none of the clients {", ".join(clients)}', key="method.edges"
                )
        parents[edge[1]].append(edge[0])
    return parents


def topological(parents: Mapping[ClientId, Sequence[ClientId]]) -> list[ClientId]:
    """All clients in the order of their names, but each client comes after its parents.

    Raises:
        InputError: there is a cycle.
    """
    done: list[ClientId] = []
    left = sorted(parents)
    while left:
        ready = next((c for c in left if all(p in done for p in parents[c])), None)
        if ready is None:
            raise InputError(f"method.edges: {', '.join(left)} form a cycle", key="method.edges")
        done.append(ready)
        left.remove(ready)
    return done
