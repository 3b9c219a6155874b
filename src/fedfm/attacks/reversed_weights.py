"""Reversed weights: attackers send their trained weights with the opposite sign.

Wu, Li, Wang, Wang. FedMS: Federated Learning with Mixture of Sparsely Activated Foundations Models.
arXiv:2312.15926, Section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedfm.attacks.attack import Attack
from fedfm.core.client import Update
from fedfm.core.fields import setting
from fedfm.linalg.params import Params

STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class ReversedWeights(Attack):
    """The server gets -w_k, as in the paper, or 2 w_t - w_k, in place of w_k.

    Running means and variances do not change, because a negative variance would be detected at once.

    With ``negate`` the mean moves towards zero, where a LoRA model equals its base model. With ``reflect`` the weights
    that an attacker sends have the same distance from w_t as w_k.
    """

    variant: str = setting("negate", "negate: -w_k; reflect: 2 w_t - w_k", choices=("negate", "reflect"))

    def upload(self, update: Update, w: Params | None) -> Update:
        delta = update.delta
        changed = -delta if self.variant == "reflect" or w is None else -delta - 2 * w
        return replace(update, delta=changed.replace({n: delta[n] for n in delta if n.endswith(STATISTICS)}))

    @property
    def needs(self) -> str:
        return "update"
