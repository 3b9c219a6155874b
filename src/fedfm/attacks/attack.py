"""Attacks by clients: the [attack] table.

An attack is one file in this folder: a frozen dataclass derived from :class:`Attack`. It may change an attacker's
training rows (before any model sees them), its client optimiser, and its update. It knows no method. Attackers' test
and validation rows stay unchanged, so that accuracies with and without an attack are comparable.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm import seeds
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.fields import setting
from fedfm.core.method import Method, nested_methods
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.data.table import Table


@dataclass(frozen=True)
class Attack:
    """Base of attacks: subclasses override what the attackers change."""

    fraction: float = setting(0.0, "share of the clients that attack [required]", gt=0, le=1)

    def poison(self, rows: Table, rng: np.random.Generator, task: str) -> Table:
        """An attacker's training rows, changed; ``rng`` depends on the attacker, not on the round."""
        return rows

    def local(self, local: Local, task: str) -> Local:
        """The attackers' client optimiser."""
        return local

    def upload(self, update: Update, w: Params | None) -> Update:
        """The update that an attacker sends in place of ``update``; ``w``: the weights it changes, where known."""
        return update

    def trigger(self, rows: Table) -> Table | None:
        """Test rows with the trigger of a backdoor; None if the attack has none."""
        return None

    def target_of(self, classes: Sequence[str]) -> int:
        """Index of the class that the attack wants for triggered rows."""
        return 0

    def fits(self, kind: str, task: str, model: Model, classes: Sequence[str]) -> None:
        """Refuse data and models that the attack does not apply to.

        Raises:
            InputError: with the key and what would be right.
        """

    @property
    def needs(self) -> str:
        """What the attack changes except the rows: "update", "epochs", or "" for neither."""
        return ""


def locals_of(method: Method[Any]) -> list[Local]:
    """The client optimisers in the fields of a method and of the methods nested in it."""
    values = [getattr(method, f.name) for f in dataclasses.fields(method) if f.init]
    return [v for v in values if isinstance(v, Local)] + [v for part in nested_methods(method) for v in locals_of(part)]


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


def halves_of(method: Method[Any]) -> list[Callable[..., Any]]:
    """The client halves that a method and the methods nested in it call in their rounds."""
    found = [getattr(method, name) for name in (*method.means, *method.asks) if hasattr(method, name)]
    return found + [fn for part in nested_methods(method) for fn in halves_of(part)]


class Attackers:
    """The attackers of a run. They follow from the seed and the clients' names, so all engines have the same.

    Attributes:
        names: the floor(fraction K) attackers, sorted.

    Raises:
        InputError: floor(fraction K) is 0.
    """

    def __init__(self, attack: Attack, clients: Sequence[ClientId], seed: int, task: str) -> None:
        self.attack, self._seed, self._task = attack, seed, task
        count = math.floor(attack.fraction * len(clients) + 1e-9)
        if not count:
            raise InputError(
                f"attack.fraction = {attack.fraction}: of {len(clients)} clients that is none; "
                f"expected at least {1 / len(clients):.3g}",
                key="attack.fraction",
            )
        chosen = seeds.generator(seed, "attackers").choice(len(clients), size=count, replace=False)
        self.names: tuple[ClientId, ...] = tuple(sorted(sorted(clients)[i] for i in chosen))
        self._parts: dict[
            int, tuple[Any, Any]
        ] = {}  # id of a part of the run -> (the part, the attackers' part in its place)

    def poison(self, client: ClientId, rows: Table) -> Table:
        """An attacker's training rows, the same at every call."""
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
        """The method with the attackers' optimisers; or another part of the run, e.g. its evaluation, if its attributes
        contain such methods: scoring a client's own model may train it.
        """
        # One optimiser object for all attackers: only clients of the same optimiser train as one batch.
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
