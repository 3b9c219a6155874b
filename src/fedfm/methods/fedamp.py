"""FedAMP: Personalized Cross-Silo Federated Learning on Non-IID Data.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang. AAAI 2021. arXiv:2007.03797, Algorithm 1, with A(x) = 1 - exp(-x / sigma).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedfm.core.capabilities import Personal, Traits
from fedfm.core.client import Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method
from fedfm.errors import InputError
from fedfm.linalg.client_vectors import Vectors
from fedfm.linalg.pairwise import gram, mix
from fedfm.linalg.params import Params
from fedfm.models.layers import layers
from fedfm.training import SGD, Local


@dataclass(frozen=True)
class Clouds:
    """Server state.

    Attributes:
        w: w_i, every client's own model: the result of its last local training.
        u: u_i, the cloud model from which that training started.
        xi: ``xi`` (1, K, K), the weights of the last round; the rows of clients that were not asked are zero.
    """

    w: dict[ClientId, Params]
    u: dict[ClientId, Params]
    xi: Params


@dataclass(frozen=True)
class FedAMP(Personal, Method[Clouds]):
    """Attentive message passing: each client is pulled towards a mean of all models, and similar models weigh more.

    A client that is not asked in a round keeps its w_i, which still enters the other clients' means.
    """

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True)
    asks: ClassVar[tuple[str, ...]] = ("train",)
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.sigma": Paper("a constant", "no constant fits all data sets, since models lie at different distances"),
        "method.alpha": Paper("a constant", "above sigma / (K - 1) the weight of a client's own model is negative"),
    }

    rounds: int = setting(10, "communication rounds; 0 evaluates the initial model", ge=0)
    fraction: float = setting(1.0, "the fraction of clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(), "client optimiser: E, B, eta")
    sigma: float | None = setting(None, "scale of squared distances in A; if absent, each round's median", gt=0)
    alpha: float | None = setting(None, "step of message passing, at most sigma/(K - 1); if absent, sigma/K", gt=0)
    mu: float = setting(0.1, "lambda/alpha; clients minimise f_i(w) + mu/2 ||w - u_i||^2", ge=0)

    def init(self, fed: Federation) -> Clouds:
        K = len(fed.clients)
        if self.alpha is not None and self.sigma is not None and self.alpha * (K - 1) > self.sigma:
            raise InputError(
                f"method.alpha = {self.alpha}: with {K} clients and sigma = {self.sigma} a client's own weight, xi_ii, "
                f"is negative if models are similar; expected at most {self.sigma / (K - 1):.6g}",
                key="method.alpha",
            )
        start = dict.fromkeys(fed.clients, fed.initial)
        return Clouds(start, start, Params({"xi": torch.zeros(1, K, K)}))

    def step(self, fed: Federation, s: Clouds, t: int) -> Clouds:
        cohort, w_0 = fed.sample(self.fraction), fed.initial
        # Subtract w_0: all models contain it, and in float32 its large entries would hide the small differences.
        apart = list(Vectors({i: s.w[i] for i in fed.clients}).less(w_0).values())
        G = gram(apart, list(layers(fed.model, "model").values()))[0]
        xi = weights(squared_distances(G), self.sigma, self.alpha)
        rows = [fed.clients.index(i) for i in cohort]
        u = Vectors(zip(cohort, mix(xi[None, rows], apart, None, [w_0] * len(rows)), strict=True))  # sum_j xi_ij w_j
        replies = fed.ask(self.train, of=cohort, like=w_0.layout, u=each(u))
        w = u + {i: update.delta for i, update in replies.items()}
        shown = np.zeros((1, *xi.shape), dtype=np.float32)
        shown[0, rows] = xi[rows]
        return Clouds(s.w | w, s.u | {i: u[i] for i in w}, Params({"xi": torch.from_numpy(shown)}))

    @on_client
    def train(self, client: Client, u: Params) -> Update:
        w = self.local(client, u, mu=self.mu)  # argmin f_i(w) + lambda/(2 alpha) ||w - u_i||^2, from u_i
        return Update(w - u, 1.0, client.metrics)

    def params_for(self, s: Clouds, client: ClientId) -> Params:
        return s.w[client]

    def start_models(self, s: Clouds) -> dict[ClientId, Params]:
        return s.u

    def arrays(self, s: Clouds) -> dict[str, np.ndarray]:
        return {"weights": s.xi["xi"].numpy(), "layers": np.array(["model"])}

    def validate(self) -> None:
        if self.alpha is not None and self.sigma is None:
            raise InputError(
                "method.alpha: the step is relative to sigma; set method.sigma as well, or neither", key="method.alpha"
            )


def squared_distances(G: np.ndarray) -> np.ndarray:
    """Squared distances ||w_i - w_j||^2 (K, K) from the inner products G (K, K)."""
    square = np.diag(G)
    return np.asarray(np.maximum(square[:, None] + square - 2 * G, 0))


def weights(d: np.ndarray, sigma: float | None = None, alpha: float | None = None) -> np.ndarray:
    """Weights xi (K, K) from squared distances d (K, K): xi_ij = alpha A'(d_ij), and xi_ii = 1 - sum_{j != i} xi_ij."""
    K, others = len(d), ~np.eye(len(d), dtype=bool)
    if sigma is None:
        # Clients that were never asked have equal models, at distance 0, which would distort the scale.
        apart = d[others & (d > 0)]
        # If all models are equal, every sigma gives the same result.
        sigma = float(np.median(apart)) if apart.size else 1.0
    if alpha is None:
        alpha = sigma / K
    xi: np.ndarray = np.where(others, alpha / sigma * np.exp(-d / sigma), 0.0)
    np.fill_diagonal(xi, 1 - xi.sum(1))
    return xi
