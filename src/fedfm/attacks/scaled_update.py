"""Scaled update: attackers send a multiple of their update.

Bagdasaryan, Veit, Hua, Estrin, Shmatikov. How To Backdoor Federated Learning. AISTATS 2020. arXiv:1807.00459, eq. 3
(model replacement); a negative factor is the scaled sign flip of Li et al., arXiv:1811.03761.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedfm.attacks.attack import Attack
from fedfm.core.client import Update
from fedfm.core.fields import setting
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class ScaledUpdate(Attack):
    """Sends gamma delta in place of delta, with the same weight."""

    factor: float = setting(10.0, "gamma; a negative value also flips the sign", finite=True, but=(0.0, 1.0))

    def upload(self, update: Update, w: Params | None) -> Update:
        return replace(update, delta=self.factor * update.delta)

    @property
    def needs(self) -> str:
        return "update"
