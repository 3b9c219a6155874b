"""DSFL: Dynamic Sparsification for Federated Learning.

Beitollahi, Liu, Lu. ICCSPA 2022; no arXiv number. This is the variant of FedPFT's comparison (arXiv:2402.01862, Section
6): each client sends the coordinates of its update that are largest in magnitude, by default half of them. The client
adds the unsent coordinates to its next update, as in Algorithm 1 of Stich, Cordonnier, Jaggi: Sparsified SGD with
Memory, NeurIPS 2018, arXiv:1809.07599. With ``feedback = false`` it drops them. In the paper of DSFL each client's
fraction depends on its connection; here all clients have the same ``keep``.

Omitted entries are sent as zeros, because an aggregator that hides single updates can only average dense vectors.
``bytes_up`` counts these zeros; ``details`` reports the bytes of the values and positions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Judge, Needs
from fedfm.core.client import Client, Update, on_client
from fedfm.core.fields import setting
from fedfm.linalg.params import Params
from fedfm.methods.fedavg import FedAvg


@dataclass(frozen=True)
class DSFL(FedAvg):
    """FedAvg with only the largest coordinates of every client's update."""

    needs: ClassVar[Needs] = Needs("head", ("head",), one_class=True)

    keep: float = setting(0.5, "fraction of the coordinates that are sent", gt=0, le=1)
    feedback: bool = setting(True, "add the unsent coordinates to the client's next update")

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        delta = self.local(client, w) - w
        if self.feedback and "residual" in client.memory:
            delta = client.memory["residual"] + delta  # m_t + eta g_t, line 3
        sent = delta.map(lambda flat: largest(flat, self.keep))  # comp_k
        if self.feedback:
            client.memory["residual"] = delta - sent  # line 5
        return Update(sent, self.weight(client), client.metrics)

    def details(self, w: Params, judge: Judge | None) -> dict[str, Any]:
        kept = sum(_count(size, self.keep) for dtype, size in w.layout.sizes.items() if dtype.is_floating_point)
        return {"sparse_bytes_per_update": 8 * kept}  # each entry is a float32 and an int32 position


def largest(flat: Tensor, keep: float) -> Tensor:
    """The ceil(keep P) entries of largest magnitude, zeros elsewhere."""
    index = flat.abs().topk(_count(len(flat), keep), sorted=False).indices
    return torch.zeros_like(flat).index_copy(0, index, flat[index])


def _count(size: int, keep: float) -> int:
    return math.ceil(keep * size)
