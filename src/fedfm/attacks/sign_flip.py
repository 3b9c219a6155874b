"""Sign flip: attackers send the negative of their update.

Li, Xu, Chen, Giannakis, Ling. RSA: Byzantine-Robust Stochastic Aggregation Methods. AAAI 2019. arXiv:1811.03761.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedfm.attacks.attack import Attack
from fedfm.core.client import Update
from fedfm.linalg.params import Params


@dataclass(frozen=True)
class SignFlip(Attack):
    """Sends -delta in place of delta, with the same norm and weight, so that a bound on norms does not detect it."""

    def upload(self, update: Update, w: Params | None) -> Update:
        return replace(update, delta=-update.delta)

    @property
    def needs(self) -> str:
        return "update"
