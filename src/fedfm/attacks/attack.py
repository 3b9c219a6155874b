"""Attacks by clients, which the table [attack] chooses.

An attack is one file in this folder, with a frozen dataclass derived from :class:`Attack`. It may change an attacker's
training rows (before any model sees them), its client optimiser, and its update. It does not depend on the method.
Attackers' test and validation rows stay unchanged, so that accuracies with and without an attack can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm.core.client import Update
from fedfm.core.fields import setting
from fedfm.core.method import Method, nested_methods
from fedfm.linalg.params import Params
from fedfm.models.model import Model
from fedfm.training import Local

if TYPE_CHECKING:
    from fedfm.data.table import Table


@dataclass(frozen=True)
class Attack:
    """Base class of attacks. Subclasses override the methods for those parts of a run that the attackers change."""

    fraction: float = setting(0.0, "fraction of the clients that attack [required]", gt=0, le=1)

    def poison(self, rows: Table, rng: np.random.Generator, task: str) -> Table:
        """Change an attacker's training rows; ``rng`` depends on the attacker, but not on the round."""
        return rows

    def local(self, local: Local, task: str) -> Local:
        """The attackers' client optimiser."""
        return local

    def upload(self, update: Update, w: Params | None) -> Update:
        """The update that an attacker sends in place of ``update``; ``w``: the received weights, if known."""
        return update

    def trigger(self, rows: Table) -> Table | None:
        """Test rows with the trigger of a backdoor; None if the attack has none."""
        return None

    def target_of(self, classes: Sequence[str]) -> int:
        """Index of the class that the attack wants for rows with the trigger."""
        return 0

    def fits(self, kind: str, task: str, model: Model, classes: Sequence[str]) -> None:
        """Refuse data and models to which the attack does not apply.

        Raises:
            InputError: the attack does not apply; the error names the key and a valid value.
        """

    @property
    def needs(self) -> str:
        """What the attack changes in addition to the rows: "update", "epochs", or "" for nothing."""
        return ""


def locals_of(method: Method[Any]) -> list[Local]:
    """The client optimisers in the fields of a method and of the methods nested in it."""
    values = [getattr(method, f.name) for f in dataclasses.fields(method) if f.init]
    return [v for v in values if isinstance(v, Local)] + [v for part in nested_methods(method) for v in locals_of(part)]


def halves_of(method: Method[Any]) -> list[Callable[..., Any]]:
    """The client halves that a method, and the methods nested in it, call in their rounds."""
    found = [getattr(method, name) for name in (*method.means, *method.asks) if hasattr(method, name)]
    return found + [fn for part in nested_methods(method) for fn in halves_of(part)]
