"""FedAWA: Adaptive Optimization of Aggregation Weights in Federated Learning Using Client Vectors.

Shi, Zhao, Zhang, Zhou, Guo, Chang. CVPR 2025. arXiv:2503.15842, Algorithm 1, with the settings of its authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedfm.core.capabilities import Traits
from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg
from fedfm.models.layers import layers

EPSILON = 1e-8  # epsilon of Adam and of the cosine similarity; torch's defaults


@dataclass(frozen=True)
class Weighted:
    """Server state: the model w, and a logit a_k for every client asked so far. Weights lambda are softmax(a)."""

    w: Params
    a: dict[ClientId, float]


@dataclass(frozen=True)
class FedAWA(FedAvg):
    """FedAvg with learnt weights. Updates near the mean update, and models near the shared model, get large weights."""

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, rows_by_optimiser=True)
    means: ClassVar[tuple[str, ...]] = ()
    asks: ClassVar[tuple[str, ...]] = ("train",)
    state_type: ClassVar[Any] = Weighted

    server_learning_rate: float = setting(0.001, "learning rate of the Adam step on the logits of the weights", gt=0)

    def init(self, fed: Federation) -> Weighted:  # type: ignore[override]
        return Weighted(fed.initial, {})

    def step(self, fed: Federation, s: Weighted, t: int) -> Weighted:  # type: ignore[override]
        cohort = fed.sample(self.fraction)
        replies = fed.ask(self.train, of=cohort, like=fed.initial.layout, w=s.w)
        tau = [update.delta for update in replies.values()]  # client vectors w_k - w
        n = sum(update.weight for update in replies.values())
        # A client's first logit is n_k/n, its fraction of the rows of the cohort.
        a = np.array([s.a.get(k, update.weight / n) for k, update in replies.items()])
        G = gram([s.w, *tau], list(layers(fed.model, "model").values()))[0]  # (1 + K, 1 + K)
        (w,) = mix(softmax(a)[None, None], tau, None, [s.w])  # with the lambda from before the step on the logits
        new = step(a, G, self.server_learning_rate)
        return Weighted(w, s.a | dict(zip(replies, new.tolist(), strict=True)))

    def params_for(self, s: Weighted, client: ClientId) -> Params:  # type: ignore[override]
        return s.w


def softmax(a: np.ndarray) -> np.ndarray:
    """The weights lambda (K,) of logits (K,)."""
    e = np.exp(a - a.max())
    return np.asarray(e / e.sum())


def step(a: np.ndarray, G: np.ndarray, eta: float) -> np.ndarray:
    """Logits (K,) of the weights lambda after one step of a newly started Adam.

    Adam minimises sum_k lambda_k (1 - cos(w, w_k)) + sum_k lambda_k ||tau_k - sum_j lambda_j tau_j||.

    Args:
        G: inner products (1 + K, 1 + K) of w, tau_1 ... tau_K. The objective depends on nothing else.
        eta: learning rate. The first step of Adam is eta g / (|g| + epsilon), for every beta_1 and beta_2.
    """
    ww, wt, tt = G[0, 0], G[0, 1:], torch.from_numpy(G[1:, 1:])
    norms = np.sqrt(np.maximum(ww * (ww + 2 * wt + np.diag(G)[1:]), 0))  # ||w|| ||w_k||
    apart = torch.from_numpy(1 - (ww + wt) / np.maximum(norms, EPSILON))
    logits = torch.from_numpy(a).requires_grad_(True)
    lambda_ = torch.softmax(logits, 0)
    square = torch.diagonal(tt) - 2 * tt @ lambda_ + lambda_ @ tt @ lambda_  # ||tau_k - sum_j lambda_j tau_j||^2
    # A square below this is a rounding error and counts as 0. The distance is then constant: sqrt has no gradient at 0.
    least = 1e-14 * max(float(torch.diagonal(tt).max()), 1e-300)
    distance = torch.where(square > least, square.clamp_min(least).sqrt(), 0.0)
    (g,) = torch.autograd.grad(lambda_ @ (apart + distance), logits)
    return np.asarray(a - eta * (g / (g.abs() + EPSILON)).numpy())
