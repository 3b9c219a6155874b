"""L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual Representation Learning.

Rehman, Gao, Buarque de Gusmao, Alibeigi, Shen, Lane. ICCV 2023. arXiv:2307.07393, Algorithm 1; a layer is a tensor.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, on_client
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class LDAWA(FedAvg):
    """w_l = 1/K sum_k cos(w_kl, w_l) w_kl: the more a tensor turns from w_l, the less it counts.

    A client knows both vectors of its cosine, so it sends cos(w_kl, w_l) w_kl, and the server only needs a mean.
    """

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, rows_by_optimiser=True)

    weighting: str = setting(
        "uniform", "weight of a client in the mean: uniform (the paper) or size", choices=("size", "uniform")
    )

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        w_k = self.local(client, w)
        return Update(scale(w_k, w, client.model.live()) - w, self.weight(client), client.metrics)


def scale(w_k: Params, w: Params, trained: Container[str]) -> Params:
    """delta_kl w_kl for every trained tensor l, delta_kl = cos(w_kl, w_l); other entries are unchanged."""
    return Params({n: delta(x, w[n]) * x if x.dim() and n in trained else x for n, x in w_k.items()})


def delta(x: Tensor, y: Tensor) -> float:
    """cos(x, y), in float64; 1 if either is zero, e.g. LoRA's B at the start."""
    a, b = x.double().reshape(-1), y.double().reshape(-1)
    norms = float(a.norm() * b.norm())
    return float(a @ b) / norms if norms else 1.0
