"""Scaled update: attackers send a multiple of their update.

Bagdasaryan, Veit, Hua, Estrin, Shmatikov. How To Backdoor Federated Learning. AISTATS 2020. arXiv:1807.00459, eq. 3
(model replacement); a negative factor is the scaled sign flip of Li et al., arXiv:1811.03761.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from fedfm.attacks.attack import Attack, needs_updates
from fedfm.core.client import Update
from fedfm.core.method import Method
from fedfm.errors import InputError


@dataclass(frozen=True)
class ScaledUpdate(Attack):
    """gamma delta instead of delta, under the same weight."""

    factor: float = field(default=10.0, metadata={"help": "gamma; a negative one turns the update around as well"})

    def upload(self, update: Update) -> Update:
        return replace(update, delta=self.factor * update.delta)

    def validate(self, method: Method[Any], name: str) -> None:
        super().validate(method, name)
        if not math.isfinite(self.factor) or self.factor in (0.0, 1.0):
            raise InputError(f"attack.factor = {self.factor}: expected a finite number other than 0 and 1")
        needs_updates(method, name, "scaled_update")
