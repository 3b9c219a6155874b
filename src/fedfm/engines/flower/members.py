"""The members of a run: the nodes that answered a hello as clients of the run. Other nodes are listed with reasons."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from fedfm.core.client import ClientId
from fedfm.core.messages import Reply
from fedfm.engines.answers import other_version, parse_hello
from fedfm.engines.flower.registry import Registry, node_of
from fedfm.errors import E_CLIENT, E_DIED, E_TIMEOUT, ClientFault

_SILENT = (E_DIED, E_TIMEOUT)  # codes of a client that did not answer


class Members:
    """The clients of a run by name, with their nodes.

    Args:
        registry: names under which the nodes' keys are registered.
        expected: names of the expected clients; if silos have their own rows, other names may come, too.
        identity: fingerprint of the server's model; a client with another model does not take part.
        known: clients that took part before a stop.
        notice: called for every node that does not take part.
        again: whether a client that did not answer its hello gets another one with its next request.

    Attributes:
        nodes: node of each client that takes part.
        barred: the reason for each client that may not take part.
        absent: the reason for each client in ``barred``, and for each node that is not a client of the run.
        own_data: whether the silos have their own rows, rather than parts of the server's table.
        connected: names of connected nodes that get their hello when they are first asked.
        gathered: whether the run has its clients. Silos that come later must have rows of the same kind.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        expected: Sequence[ClientId],
        identity: str | None,
        known: Collection[ClientId],
        notice: Callable[[str], None],
        again: bool = False,
    ) -> None:
        self._registry, self._notice = registry, notice
        self._expected, self._identity, self._before = tuple(expected), identity, frozenset(known)
        self.nodes: dict[ClientId, int] = {}
        self.barred: dict[ClientId, ClientFault] = {}
        self.absent: dict[str, ClientFault] = {}
        self.own_data = self.gathered = False
        self.connected: set[ClientId] = set()
        self._again = again
        self._said = set[str]()  # a node answers several hellos

    @property
    def clients(self) -> Sequence[ClientId]:
        """Sorted names of the expected clients, the connected clients, and those that took part before a stop."""
        others = self.connected if self.own_data or not self._expected else self._expected
        return sorted({*self.nodes, *self.barred, *self._before, *others})

    @property
    def missing(self) -> list[ClientId]:
        """Clients whose nodes have not answered a hello."""
        return self._away(self.clients)

    @property
    def missing_again(self) -> list[ClientId]:
        """Clients that took part before a stop and have not answered a hello since then."""
        return self._away(self._before)

    def _away(self, clients: Collection[ClientId]) -> list[ClientId]:
        return sorted({*clients} - {*self.nodes, *self.barred, *self.connected})

    def is_silent(self, client: ClientId) -> bool:
        """Whether a client that did not answer its hello gets another one."""
        fault = self.barred.get(client)
        return self._again and fault is not None and fault.code in _SILENT

    def admit(self, replies: Iterable[Reply]) -> list[tuple[ClientId, Reply]]:
        """Process replies to hellos. Only a node's first reply counts.

        Returns:
            The replies of nodes that gave a name, each with the client's name.
        """
        hellos = dict[int, tuple[Reply, ClientId | None, ClientFault | None]]()
        for reply in replies:
            hellos.setdefault(node_of(reply), (reply, *self._introduction(reply)))
        claims = {node: said for node, (_, said, _) in hellos.items() if said is not None}
        refused = self._registry.refusals(claims, self.nodes)
        introduced = []
        for node, (reply, said, fault) in hellos.items():
            name = self._registry.name(node) or (None if node in refused else said)
            fault = refused.get(node, fault)
            stranger = fault is None and self._is_stranger(reply, name)
            if stranger:
                fault = ClientFault(E_CLIENT, f'"{str(name)[:40]}" is not a client of this experiment')
            elif fault is None and self.gathered and reply.value.get("own_data") and not self.own_data:
                fault = ClientFault(
                    E_CLIENT, "it has its own rows, but this run began with parts of the server's table"
                )
            called = name or self._registry.display_name(node)
            if said is not None:
                introduced.append((called, reply))
            if fault is None:
                self.own_data = self.own_data or bool(reply.value.get("own_data"))
                self.nodes[called] = node
                self.barred.pop(called, None)
                continue
            self.absent[called] = fault
            if not (self._again and fault.code in _SILENT and self.gathered):  # the round names such a client
                self._notice(f"{called} does not take part: {fault}")
            if not stranger and name is not None and name not in self.nodes and name in (said, *self.clients):
                self.barred[name] = fault
        return introduced

    def leave(self, client: ClientId, fault: ClientFault) -> None:
        """Remove a client that failed to answer a later hello. If its node is not away, it takes no further part."""
        del self.nodes[client]
        if fault.code not in _SILENT:
            self.barred[client] = self.absent[client] = fault
        self._before |= {client}  # it stays a client of the run
        self._notice(f"{client} did not answer a second hello: {fault}")

    def _introduction(self, reply: Reply) -> tuple[ClientId | None, ClientFault | None]:
        """Read a reply to a hello: the node's name, and the fault for which it cannot take part; each may be None."""
        if reply.fault is not None:
            return None, reply.fault
        try:
            name, fault = parse_hello(reply.value, self._identity, self._expected)
        except ClientFault as fault:
            return None, fault
        if fault is None and (text := other_version(name, reply.value)) and text not in self._said:
            self._said.add(text)
            self._notice(text)
        return name, fault

    def _is_stranger(self, reply: Reply, name: ClientId | None) -> bool:
        """Whether a node has no rows of this experiment, neither its own nor a part of the server's table."""
        return not reply.value.get("own_data") and bool(self._expected) and name not in self._expected
