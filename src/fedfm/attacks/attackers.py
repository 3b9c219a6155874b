"""The attackers of a run: which clients attack, and how a client half runs at one of them."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfm import seeds
from fedfm.attacks.attack import Attack
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.data.table import Table


def with_locals(method: Method[Any], change: Callable[[Local], Local]) -> Method[Any]:
    """The method with changed client optimisers, also in nested methods; the same object if nothing changes."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(method):
        value = changed = getattr(method, f.name)
        if isinstance(value, Local):
            changed = change(value)
        elif isinstance(value, Method):
            changed = with_locals(value, change)
        if changed is not value:
            fields[f.name] = changed
    return dataclasses.replace(method, **fields) if fields else method


class Attackers:
    """The attackers of a run. Seed and client names determine them, so they are the same on all engines.

    Attributes:
        names: the floor(fraction K) attackers among K clients, sorted.

    Raises:
        InputError: floor(fraction K) is 0.
    """

    def __init__(self, attack: Attack, clients: Sequence[ClientId], seed: int, task: str) -> None:
        self.attack, self._seed, self._task = attack, seed, task
        count = math.floor(attack.fraction * len(clients) + 1e-9)
        if not count:
            raise InputError(
                f"attack.fraction = {attack.fraction}: for {len(clients)} clients this gives no attacker; "
                f"expected at least {1 / len(clients):.3g}",
                key="attack.fraction",
            )
        chosen = seeds.generator(seed, "attackers").choice(len(clients), size=count, replace=False)
        self.names: tuple[ClientId, ...] = tuple(sorted(sorted(clients)[i] for i in chosen))
        self._parts: dict[int, tuple[Any, Any]] = {}  # id of a part of the run -> the part, and its copy for attackers

    def poison(self, client: ClientId, rows: Table) -> Table:
        """Change an attacker's training rows, in the same way at every call."""
        return self.attack.poison(rows, seeds.generator(self._seed, "attack", client), self._task)

    def __call__(self, fn: Callable[..., Any], client: Client, payload: Mapping[str, Any]) -> Any:
        """Run a client half. An attacker uses its own optimiser and changes its update."""
        if client.id not in self.names:
            return fn(client, **payload)
        reply = getattr(self._instead(fn.__self__), fn.__name__)(client, **payload)  # type: ignore[attr-defined]
        if not isinstance(reply, Update):
            return reply
        like = reply.delta.layout.slots.keys()
        sent = (v for v in payload.values() if isinstance(v, Params) and v.layout.slots.keys() == like)
        return self.attack.upload(reply, next(sent, None))

    def _instead(self, part: Any) -> Any:
        """The part with the attackers' optimisers in its method.

        ``part`` is the method itself, or a part of the run that has the method as an attribute. One such part is
        the evaluation, which may train a client's own model before it computes the scores.
        """
        # All attackers share one optimiser object, since only clients with the same optimiser train as one batch.
        if id(part) not in self._parts:
            if isinstance(part, Method):
                self._parts[id(part)] = part, with_locals(part, lambda x: self.attack.local(x, self._task))
            else:
                changed = copy.copy(part)
                for name, value in vars(part).items():
                    if isinstance(value, Method):
                        object.__setattr__(changed, name, self._instead(value))
                self._parts[id(part)] = part, changed
        return self._parts[id(part)][1]
