"""A FlowerLink for a simulation, which knows the clients' nodes: a node that is never asked gets no hello."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp import Grid

from fedfm.core.client import ClientId
from fedfm.core.messages import Reply, Request
from fedfm.engines.flower.link import FlowerLink


class SimulatedLink(FlowerLink):
    """A link that greets a node when its client is first asked.

    Args:
        nodes: the node of each client.
        settings: as in :class:`~fedfm.engines.flower.link.FlowerLink`.
    """

    def __init__(self, grid: Grid, *, nodes: Mapping[ClientId, int], **settings: Any) -> None:
        self._nodes, self._asked = dict(nodes), list[int]()
        super().__init__(grid, **settings)

    def _assign_nodes(self, requests: Sequence[Request]) -> tuple[list[tuple[int, Request]], list[Reply]]:
        self._round = requests[0].round
        self._asked = [self._nodes[request.client] for request in requests]
        return super()._assign_nodes(requests)

    def _gather(self, min_clients: int) -> None:
        """Do not wait: a simulation has made its nodes before it calls the server."""

    def _greet(self) -> None:
        new = [node for node in self._asked if node not in self._greeted]
        self._greeted.update(new)
        self._meet(list(self._deliver([self._hello(node) for node in new])))
