"""The names under which the operator registered the keys of nodes. A node may only use its own name.

The SuperLink checks signatures with each node's key, so a node's id identifies its key. If a key was registered without
a name, its node may choose any free name; such a node's identity is not verified.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from flwr.serverapp import Grid

from fedfm.core.client import ClientId
from fedfm.core.messages import Reply
from fedfm.core.text import visible
from fedfm.errors import E_CLIENT, ClientFault

NAMELESS = (
    "some nodes' keys are registered without a name; such a node can use any name, and gets a hello before round 1 "
    "although no round may ask it; register them with a name: flwr supernode register KEY SUPERLINK --name NAME"
)
_MOST = 80  # longest name in a message, in characters


class Registry:
    """The registered names of the nodes.

    Args:
        tells: whether the Grid knows the names, as a SuperLink's Grid does.
    """

    def __init__(self, grid: Grid, tells: bool) -> None:
        self._grid, self._tells = grid, tells
        self._names: dict[int, ClientId] = {}

    def enter(self, names: Mapping[int, ClientId]) -> None:
        """Name the nodes of a simulation."""
        self._names = dict(names)

    def look(self) -> None:
        """Read the names of the connected nodes. A node that disconnects keeps its name here."""
        if self._tells:
            for node in self._grid.get_nodes():
                self._names[node.node_id] = str(getattr(node, "name", "") or "")

    def identify(self, nodes: Iterable[int]) -> list[int]:
        """Look up the names of nodes; returns the nodes that the SuperLink knows."""
        asked = list(nodes)
        if asked:
            self.look()
        return [node for node in asked if node in self._names or not self._tells]

    def name(self, node: int) -> ClientId | None:
        """The name under which the node's key is registered, or None."""
        return self._names.get(node) or None

    def display_name(self, node: int) -> str:
        """The node's name for messages to people."""
        return self.name(node) or f"node {node}"

    def nameless(self, nodes: Iterable[int]) -> bool:
        """Whether a SuperLink has admitted one of these nodes although its key has no name."""
        return self._tells and any(self.name(node) is None for node in nodes)

    def refusals(self, claims: Mapping[int, ClientId], taken: Mapping[ClientId, int]) -> dict[int, ClientFault]:
        """For each node that may not use the name that it claims, the reason.

        Args:
            claims: claimed names by node.
            taken: the nodes of the clients that take part already, by the client's name.
        """
        counts, owners = Counter(claims.values()), {*filter(None, self._names.values())}
        found = {node: self._refusal(node, name, counts[name] > 1, taken, owners) for node, name in claims.items()}
        return {node: ClientFault(E_CLIENT, why) for node, why in found.items() if why}

    def _refusal(
        self, node: int, name: ClientId, twice: bool, taken: Mapping[ClientId, int], owners: Collection[ClientId]
    ) -> str:
        own, said = self.name(node), f'its silo.toml says name = "{visible(name[:_MOST])}"'
        if self._tells and node not in self._names:
            return "the SuperLink no longer knows this node"
        if own is None:
            if name in owners:
                return f"{said}, but that name is registered for another node's key"
            if twice or taken.get(name, node) != node:
                return f"{said}, as another node's does, and no key has that name; give each silo its own name"
            return ""
        if own != name:
            return f'{said}, but its key is registered as "{visible(own[:_MOST])}"'
        if (twice or taken.get(name, node) != node) and [*self._names.values()].count(own) > 1:
            return f"{said}, as another node's does, and both keys are registered under that name"
        return ""


def node_of(reply: Reply) -> int:
    """The node that answered a hello."""
    return int(reply.client.removeprefix("node "))
