"""The names under which the operator registered the nodes' keys: a node may only use its own name.

The SuperLink checks signatures by each node's key, so a node's id identifies its key. A node whose key was
registered without a name may choose any free name; its identity is then unknown.
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
    "some nodes' keys are registered without a name, so such a node can use any name: "
    "flwr supernode register KEY SUPERLINK --name NAME"
)
_MOST = 80  # characters of a name in a message


class Registry:
    """Names by node.

    Args:
        tells: whether the Grid knows the names; a SuperLink's Grid does.
    """

    def __init__(self, grid: Grid, tells: bool) -> None:
        self._grid, self._tells = grid, tells
        self._names: dict[int, ClientId] = {}

    def look(self) -> None:
        """Read the names of the connected nodes. A disconnected node keeps its name."""
        if self._tells:
            for node in self._grid.get_nodes():
                self._names[node.node_id] = str(getattr(node, "name", "") or "")

    def identify(self, nodes: Iterable[int]) -> list[int]:
        """The nodes for which it is known whether they have a name."""
        asked = list(nodes)
        if asked:
            self.look()
        return [node for node in asked if node in self._names or not self._tells]

    def name(self, node: int) -> ClientId | None:
        """The name under which a node's key is registered; None if it has none."""
        return self._names.get(node) or None

    def display_name(self, node: int) -> str:
        """A node's name for people."""
        return self.name(node) or f"node {node}"

    def nameless(self, nodes: Iterable[int]) -> bool:
        """Whether a SuperLink admits one of these nodes without a name."""
        return self._tells and any(self.name(node) is None for node in nodes)

    def refusals(self, claims: Mapping[int, ClientId], taken: Mapping[ClientId, int]) -> dict[int, ClientFault]:
        """Reasons to refuse nodes the names that they claim, by node.

        Args:
            claims: claimed names by node.
            taken: nodes that take part already.
        """
        counts, owners = Counter(claims.values()), {*filter(None, self._names.values())}
        found = {node: self._refusal(node, name, counts[name] > 1, taken, owners) for node, name in claims.items()}
        return {node: ClientFault(E_CLIENT, why) for node, why in found.items() if why}

    def _refusal(
        self, node: int, name: ClientId, twice: bool, taken: Mapping[ClientId, int], owners: Collection[ClientId]
    ) -> str:
        own, said = self.name(node), f'its silo.toml says name = "{visible(name[:_MOST])}"'
        if self._tells and node not in self._names:
            return "the SuperLink no longer knows its node"
        if own is None:
            if name in owners:
                return f"{said}, and another node's key is registered under that name"
            if twice or taken.get(name, node) != node:
                return f"{said}, as another node does, and no key is registered under that name: give each silo its own"
            return ""
        if own != name:
            return f'{said}, and its key is registered as "{visible(own[:_MOST])}"'
        if [*self._names.values()].count(own) > 1 and (twice or taken.get(name, node) != node):
            return f"{said}, as another node does, and both keys are registered under that name"
        return ""


def node_of(reply: Reply) -> int:
    """The node that has answered a hello."""
    return int(reply.client.removeprefix("node "))
