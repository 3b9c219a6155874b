"""Track the connected nodes. A node that reconnects has lost the messages that it had not answered."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping

from flwr.serverapp import Grid

_LOOK = 2.0  # seconds between two updates of the list of connected nodes


class Presence:
    """The nodes of a Grid.

    Args:
        returns: whether nodes may reconnect, and the Grid knows their connection times.
    """

    def __init__(self, grid: Grid, returns: bool) -> None:
        self._grid, self._returns = grid, returns
        self._known: dict[int, str] = {}  # for each node, its last connection time
        self._online: dict[int, str] = {}
        self._looked = -math.inf
        self._given_up: set[int] = set()

    def online(self) -> Mapping[int, str]:
        """For each connected node, when it connected; "" if the Grid does not know the time."""
        if self._returns:
            found = {node.node_id: str(node.last_activated_at) for node in self._grid.get_nodes()}
        else:
            found = dict.fromkeys(self._grid.get_node_ids(), "")
        self._online, self._looked = found, time.monotonic()
        self._given_up -= found.keys()
        return found

    def look(self) -> Mapping[int, str] | None:
        """As :meth:`online`, but None if the list was updated a moment ago."""
        return None if time.monotonic() - self._looked < _LOOK else self.online()

    @property
    def last_online(self) -> Collection[int]:
        """The nodes that were connected at the last update."""
        return self._online.keys()

    def since(self, node: int) -> str:
        """When this node connected, as of the last update."""
        return self._online.get(node, "")

    def expects(self, node: int, online: Mapping[int, str]) -> bool:
        """Whether this node may still answer a message: it is connected, or the wait for it has not failed yet."""
        return node in online or (self._returns and node not in self._given_up)

    def has_reconnected(self, node: int, online: Mapping[int, str]) -> bool:
        """Whether this node has reconnected since the last call."""
        if node not in online:
            return False
        before, self._known[node] = self._known.get(node, online[node]), online[node]
        return before != online[node]

    def give_up(self, nodes: Iterable[int]) -> None:
        """Stop waiting for these nodes if they are disconnected, until they reconnect."""
        self._given_up.update(set(nodes) - self._online.keys())
