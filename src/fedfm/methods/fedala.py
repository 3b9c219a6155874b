"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. AAAI 2023. arXiv:2212.01197, Algorithm 1, with the settings of its authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.update_metrics import PASSES
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._personal import KeepingFedAvg
from fedfm.models.layers import layers

LOSSES = 10  # number of last losses; W has converged if their standard deviation is small
MOST = 100  # largest number of passes over the rows; without a limit, the clipped W could oscillate forever


@dataclass(frozen=True)
class FedALA(KeepingFedAvg):
    """FedAvg whose clients start from an entry-wise mixture of the shared model and their own.

    In its first round a client starts from the shared model, since it has no model of its own yet. The server sees what
    FedAvg's server sees, and also how many passes each client took to learn its mixture.
    """

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True)

    p: int = setting(
        1, "number of mixed top layers (a layer is a block, the final norm or the head); the others are shared", ge=1
    )
    eta: float = setting(1.0, "learning rate of the weights W", gt=0)
    share: float = setting(0.8, "fraction of a client's rows on which W is learnt, drawn anew each round", gt=0, le=1)
    threshold: float = setting(
        0.1, "in its second round a client learns W until the std of the last 10 losses is below this", gt=0
    )

    def init(self, fed: Federation) -> Params:
        if self.p > (count := len(layers(fed.model, "layer"))):
            raise InputError(
                f"method.p = {self.p}: the model has {count} trained layers; expected at most this number",
                key="method.p",
            )
        return super().init(fed)

    @on_client
    def train(self, client: Client, w: Params) -> Update:
        theta_hat, passes = self.aggregate(client, w) if "theta" in client.memory else (w, 0.0)
        theta = self.local(client, theta_hat)
        self.keep(client, theta_hat, theta)
        return Update(theta - w, self.weight(client), client.metrics | {PASSES: passes})

    def aggregate(self, client: Client, w: Params) -> tuple[Params, float]:
        """Client half: theta_hat = theta_i + (theta - theta_i) * W in the top layers, theta elsewhere; ``w`` is theta.

        Returns:
            (theta_hat, number of passes over the client's rows while W was learnt). The run counts these passes as
            computation.
        """
        model, memory, size = client.model, client.memory, self.local.batch_size
        top = [name for layer in list(layers(model, "layer").values())[-self.p :] for name in layer]
        model.load(w)
        model.eval_mode()
        live = [model.live()[name] for name in top]
        own = [memory["theta"][name].to(x.device) for name, x in zip(top, live, strict=True)]
        apart = [w[name].to(x.device) - theta_i for name, x, theta_i in zip(top, live, own, strict=True)]
        learnt = "W" in memory
        W = [memory["W"][n].to(x.device) if learnt else torch.ones_like(x) for n, x in zip(top, live, strict=True)]
        mix_into(live, own, apart, W)
        rng, n = seeds.generator(client.seed, "ala"), len(client.data.train)
        rows = rng.permutation(n)[: max(int(self.share * n), 1)]
        losses: list[float] = []
        while True:
            total = 0.0
            for start in range(0, len(rows), size):
                index = rows[start : start + size]
                loss: Tensor = model.loss(client.data.train.batch(index))
                slopes = torch.autograd.grad(loss, live)  # with respect to theta_hat
                W = [(W_l - self.eta * g * d).clamp(0, 1) for W_l, g, d in zip(W, slopes, apart, strict=True)]
                mix_into(live, own, apart, W)
                total += float(loss.detach()) * len(index)
            losses.append(total / len(rows))
            converged = len(losses) > LOSSES and np.std(losses[-LOSSES:]) < self.threshold
            if learnt or converged or len(losses) >= MOST:  # once W has been learnt, one pass is enough
                break
        memory["W"] = Params(dict(zip(top, W, strict=True)))
        return model.params(), len(losses) * len(rows) / n


def mix_into(live: Sequence[Tensor], own: Sequence[Tensor], apart: Sequence[Tensor], W: Sequence[Tensor]) -> None:
    """Write theta_hat = theta_i + (theta - theta_i) * W into the model."""
    with torch.no_grad():
        for x, theta_i, d, W_l in zip(live, own, apart, W, strict=True):
            torch.addcmul(theta_i, d, W_l, out=x)
