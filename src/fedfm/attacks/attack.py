"""What some clients of a run do instead of what the method asks: the [attack] table.

An attack is one file beside this one, a frozen dataclass derived from :class:`Attack`. It may change three things of an
attacker: the rows that it trains on (before any model sees them), its client optimiser, and the update that it sends.
It knows no method: whatever trains on rows or sends an update can be attacked. Attackers' test and validation rows
stay as they are, so that accuracies mean the same with and without an attack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm import seeds
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.fields import setting
from fedfm.core.method import Method, nested
from fedfm.errors import InputError
from fedfm.models.model import Model
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.data.table import Table

LANGUAGE = ("language_modelling", "instruction")  # tasks whose labels are words


@dataclass(frozen=True)
class Attack:
    """Subclass as a frozen dataclass and override what the attackers change."""

    fraction: float = setting(0.0, "share of the clients that attack [required]", gt=0, le=1)

    def poison(self, rows: Table, rng: np.random.Generator, task: str) -> Table:
        """One attacker's training rows as it uses them; ``rng`` is its own, the same in every round."""
        return rows

    def local(self, local: Local, task: str) -> Local:
        """The attackers' client optimiser."""
        return local

    def upload(self, update: Update) -> Update:
        """What an attacker sends instead of its update."""
        return update

    def trigger(self, rows: Table) -> Table | None:
        """Test rows with what calls a backdoor; None where the attack has none."""
        return None

    def target_of(self, classes: Sequence[str]) -> int:
        """The class that triggered rows shall be taken for."""
        return 0

    def fits(self, kind: str, task: str, model: Model, classes: Sequence[str]) -> None:
        """Refuse data and models that the attack cannot be carried out on.

        Raises:
            InputError: with the key and what would be right.
        """

    @property
    def needs(self) -> str:
        """What of a client's training it changes beside the rows: "update", "epochs", or "" for neither."""
        return ""


def locals_of(method: Any) -> list[Local]:
    """The client optimisers in the fields of a method and of the methods nested in it."""
    values = [getattr(method, f.name) for f in dataclasses.fields(method) if f.init]
    return [v for v in values if isinstance(v, Local)] + [v for part in nested(method) for v in locals_of(part)]


def with_locals(method: Any, change: Callable[[Local], Local]) -> Any:
    """The method with another client optimiser, also in the methods nested in it; itself where there is none."""
    fields: dict[str, Any] = {}
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        if isinstance(value, Local):
            fields[f.name] = change(value)
        elif isinstance(value, Method):
            fields[f.name] = with_locals(value, change)
    fields = {name: value for name, value in fields.items() if value is not getattr(method, name)}
    return dataclasses.replace(method, **fields) if fields else method


def halves_of(method: Method[Any]) -> list[Callable[..., Any]]:
    """The client halves that a method, or one nested in it, calls in its rounds."""
    found = [getattr(method, name) for name in (*method.means, *method.asks) if hasattr(method, name)]
    return found + [fn for part in nested(method) for fn in halves_of(part)]


class Attackers:
    """Who attacks, and how: the same clients on every engine, for they follow from the seed and the clients' names.

    Args:
        attack: what they do.
        clients: all names of the federation.
        seed: the run's.
        task: the model's.

    Attributes:
        names: of the floor(fraction K) attackers, sorted.

    Raises:
        InputError: the fraction of so few clients is none.
    """

    def __init__(self, attack: Attack, clients: Sequence[ClientId], seed: int, task: str) -> None:
        self.attack, self._seed, self._task = attack, seed, task
        count = math.floor(attack.fraction * len(clients) + 1e-9)
        if not count:
            raise InputError(
                f"attack.fraction = {attack.fraction}: of {len(clients)} clients that is none; "
                f"expected at least {1 / len(clients):.3g}"
            )
        chosen = seeds.generator(seed, "attackers").choice(len(clients), size=count, replace=False)
        self.names: tuple[ClientId, ...] = tuple(sorted(sorted(clients)[i] for i in chosen))
        self._methods: dict[int, tuple[Any, Any]] = {}  # id of a method -> (it, what the attackers run instead)

    def poison(self, client: ClientId, rows: Table) -> Table:
        """An attacker's training rows, the same ones whenever they are asked for."""
        return self.attack.poison(rows, seeds.generator(self._seed, "attack", client), self._task)

    def __call__(self, fn: Callable[..., Any], client: Client, payload: Mapping[str, Any]) -> Any:
        """Run a client half: an attacker's with its own optimiser, and its update changed."""
        if client.id not in self.names:
            return fn(client, **payload)
        reply = getattr(self._method(fn.__self__), fn.__name__)(client, **payload)  # type: ignore[attr-defined]
        return self.attack.upload(reply) if isinstance(reply, Update) else reply

    def _method(self, method: Any) -> Any:
        # One optimiser object for all attackers: a cohort is trained together where the optimiser is the same.
        if id(method) not in self._methods:
            self._methods[id(method)] = method, with_locals(method, lambda x: self.attack.local(x, self._task))
        return self._methods[id(method)][1]
