"""FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning.

Chen, Chao. ICLR 2021. arXiv:2009.01974, Algorithm 1 with one round. Equation numbers are the paper's.

The paper distils the ensemble into one model on the server's unlabelled rows. Here the server has no rows. So the
ensemble itself predicts the Bayesian mean of probabilities (eq. 5), the target of the paper's distillation. The result
contains all heads of the ensemble: the clients' heads, their mean, and the drawn heads. ``members = "sampled"`` keeps
only the drawn heads, as in eq. (5). The server sees every client's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Predictor, Traits
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.linalg.running_mean import weighted_mean
from fedfm.methods._one_shot import OwnHeads, as_heads, mean_probability, zeros_for_unseen
from fedfm.models.model import Model


@dataclass(frozen=True)
class FedBE(Predictor, OwnHeads):
    """The clients' heads, their mean, and heads drawn from a Gaussian around the mean predict together."""

    traits: ClassVar[Traits] = Traits(independent_messages=True)
    asks: ClassVar[tuple[str, ...]] = ("fit",)
    paper: ClassVar[Mapping[str, Paper]] = {  # settings of FedPFT's comparison
        "method.draws": Paper(15),
        "method.head.optimizer": Paper("adam", "newton reaches the optimum; Adam at 0.0001 stays far from it"),
        "method.head.learning_rate": Paper(1e-4),
    }

    draws: int = setting(15, "M, heads sampled from the Gaussian", ge=0)
    members: str = setting(
        "all", "members of the ensemble: all (clients, mean, draws) or sampled", choices=("all", "sampled")
    )

    def init(self, fed: Federation) -> Params:
        return as_heads(super().init(fed))

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        updates = self.ask_heads(fed)
        mu, variance = gaussian([(update.weight, zeros_for_unseen(update.delta)) for update in updates])
        sampled = [sample(mu, variance, fed.seed_for("draw", m)) for m in range(self.draws)]
        return as_heads(*([] if self.members == "sampled" else [*(u.delta for u in updates), mu]), *sampled)

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        """Logarithm of p(y|x; S) = 1/M sum_m p(y|x; w^(m)), eq. (5)."""
        return mean_probability(model, w, rows)

    def validate(self) -> None:
        if self.members == "sampled" and not self.draws:
            raise InputError('method.draws = 0: members = "sampled" needs at least 1 draw', key="method.draws")


def gaussian(heads: Sequence[tuple[float, Params]]) -> tuple[Params, Params]:
    """Mean and variances: mu = sum_k n_k/n w_k and Sigma_diag = sum_k n_k/n (w_k - mu)^2, eq. (6)."""
    mu = weighted_mean(heads)
    return mu, weighted_mean((n_k, (w_k - mu).map(torch.square)) for n_k, w_k in heads)


def sample(mu: Params, variance: Params, seed: int) -> Params:
    """One draw from N(mu, diag(variance))."""
    rng = seeds.generator(seed, "noise")
    noise = Params({name: torch.from_numpy(rng.standard_normal(tuple(t.shape))).to(t.dtype) for name, t in mu.items()})
    return mu + noise.map(lambda e, v: e * v.sqrt(), variance)
