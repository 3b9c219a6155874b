"""L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual Representation Learning.

Rehman, Gao, Buarque de Gusmao, Alibeigi, Shen, Lane. ICCV 2023. arXiv:2307.07393, Algorithm 1; a layer is a tensor.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from torch import Tensor

from fedfm.core.client import Client, Update, on_client
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class LDAWA(FedAvg):
    """w_l = 1/K sum_k cos(w_kl, w_l) w_kl: who has turned away from the shared model counts less, tensor by tensor.

    A client knows both vectors of its cosine. It turns w_k into cos(w_kl, w_l) w_kl itself, and the server needs the
    mean alone.
    """

    weighting: str = setting(
        "uniform", "of the mean: uniform, as in the paper, or size (n_k)", choices=("size", "uniform")
    )

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        w_k = self.local(client, w)
        n_k = len(client.data.train) if self.weighting == "size" else 1
        return Update(scaled(w_k, w, client.model.live()) - w, n_k, client.metrics)


def scaled(w_k: Params, w: Params, trained: Container[str]) -> Params:
    """delta_kl w_kl for every tensor l, delta_kl = cos(w_kl, w_l); numbers and running statistics as they are."""
    return Params({n: delta(x, w[n]) * x if x.dim() and n in trained else x for n, x in w_k.items()})


def delta(x: Tensor, y: Tensor) -> float:
    """cos(x, y), in float64; 1 where either is zero, as LoRA's B at the start: it has no angle."""
    a, b = x.double().reshape(-1), y.double().reshape(-1)
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else 1.0
