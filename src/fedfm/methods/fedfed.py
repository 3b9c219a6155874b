"""FedFed: Feature Distillation against Data Heterogeneity in Federated Learning.

Yang, Zhang, Zheng, Tian, Peng, Liu, Han. NeurIPS 2023. arXiv:2310.05077, Algorithm 1.

Clients share the performance-sensitive part x_s = x - q(x) of each row, with noise. They train on their own rows and on
shared ones. The paper works on pixels, with a beta-VAE as q. Here q is a linear autoencoder of low rank on the features
of a frozen backbone, a penalty replaces the constraint ||x_s||^2 <= rho, and sigma_s is in units of the RMS of x_s. The
noise gives no privacy guarantee: the server sees every noisy x_s with its label, and sends samples of them to clients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Needs
from fedfm.core.client import Client, ClientData, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.rows import Rows
from fedfm.errors import E_SHAPE, ClientFault
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import need_head, rows_of
from fedfm.methods.fedavg import FedAvg
from fedfm.privacy.noise import digest
from fedfm.training.local_job import mini_batches


@dataclass(frozen=True)
class Labelled:
    """Shared rows: x_p (n, d) and y (n,)."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class FedFedState:
    """Server state: the head, and the shared rows D_s by the client that shared them."""

    w: Params
    shared: dict[str, Labelled]


@dataclass(frozen=True)
class FedFed(FedAvg):
    """Round 1 first distils features. Then every round is FedAvg on each client's own rows and on shared ones."""

    needs: ClassVar[Needs] = Needs("head", ("head",), one_class=True)
    means: ClassVar[tuple[str, ...]] = ("distil", "train")
    asks: ClassVar[tuple[str, ...]] = ("share",)
    state_type: ClassVar[Any] = FedFedState

    distillation_rounds: int = setting(5, "T_d, rounds of FedAvg that train the generator q, within round 1", ge=1)
    distillation_epochs: int = setting(5, "epochs of Adam on q in each distillation round", ge=1)
    rank: int = setting(16, "rank of the generator q", ge=1)
    penalty: float = setting(
        1.0, "weight of the penalty ||x_s||^2 / ||x||^2, which replaces the paper's limit rho", ge=0
    )
    noise: float = setting(0.15, "sigma_s, std of the noise in units of the root mean square of x_s", ge=0)

    def init(self, fed: Federation) -> FedFedState:  # type: ignore[override]
        need_head(fed.model, bias=False)
        return FedFedState(fed.initial, {})

    def step(self, fed: Federation, state: FedFedState, t: int) -> FedFedState:  # type: ignore[override]
        shared = state.shared or self._distil(fed)
        cohort = fed.sample(self.fraction)
        given = each({c: others(shared, c, fed.model.feature_dim, fed.seed_for("shared", c)) for c in cohort})
        return FedFedState(state.w + fed.mean(self.train, of=cohort, w=state.w, given=given), shared)

    def _distil(self, fed: Federation) -> dict[ClientId, Labelled]:
        """T_d rounds of FedAvg on the generator's parameters theta; then every client shares its rows x_p."""
        d, classes = fed.model.feature_dim, len(fed.model.classes)
        encode = seeds.generator(fed.seed_for("generator"), "start").standard_normal((self.rank, d)) / d**0.5
        zeros = {"decode": torch.zeros(d, self.rank), "w": torch.zeros(classes, d), "b": torch.zeros(classes)}
        theta = Params({"encode": torch.from_numpy(encode).float(), **zeros})  # q = 0: at first x_s = x
        for r in range(self.distillation_rounds):
            theta = theta + fed.mean(self.distil, like=theta.layout, theta=theta, r=r)

        def check(reply: Labelled) -> None:
            right = reply.x.shape == (len(reply.y), d) and reply.y.dtype == torch.int64
            if not right or not bool(((reply.y >= 0) & (reply.y < classes)).all()):
                raise ClientFault(E_SHAPE, f"shared rows {tuple(reply.x.shape)} with labels that do not fit")

        return fed.ask(self.share, check=check, theta=theta)

    @on_client
    def distil(self, client: Client, theta: Params, r: int) -> Update:
        """Minimise -log p(y | x_s) + penalty ||x_s||^2 / ||x||^2 with Adam, on features scaled to RMS 1."""
        x, y = rows_of(client)
        x = x / _rms(x)
        live = {name: tensor.clone().requires_grad_() for name, tensor in theta.items()}
        optimiser = torch.optim.Adam(live.values(), lr=0.01)
        seed = seeds.derive(client.seed, "distil", r)
        for i in map(torch.from_numpy, mini_batches(len(y), 64, self.distillation_epochs, seed)):
            optimiser.zero_grad()
            x_s = sensitive(live["encode"], live["decode"], x[i])
            loss = F.cross_entropy(F.linear(x_s, live["w"], live["b"]), y[i])
            loss = loss + self.penalty * x_s.square().sum() / x[i].square().sum().clamp_min(1e-12)
            torch.autograd.backward(loss)
            optimiser.step()
        return Update(Params(live) - theta, len(y))

    @on_client
    def share(self, client: Client, theta: Params) -> Labelled:
        """Share x_p = x_s + N(0, sigma_s^2).

        The noise also depends on x_s, so knowing the seed alone is not enough to subtract it.
        """
        x, y = rows_of(client)
        x_s = sensitive(theta["encode"], theta["decode"], x)
        draw = seeds.generator(client.seed, "share", digest(x_s.numpy(), y.numpy(), repr(self.noise)))
        n = torch.from_numpy(draw.standard_normal(tuple(x.shape))).float()
        return Labelled(x_s + self.noise * _rms(x_s) * n, y)

    @on_client(varying=("given",))
    def train(self, client: Client, w: Params, given: Labelled) -> Update:  # type: ignore[override]
        """FedAvg's local training, on the client's rows D_k and on a sample ``given`` of the shared rows D_s."""
        x, y = rows_of(client)
        rows = Rows({"features": torch.cat([x, given.x])}, labels=torch.cat([y, given.y]))
        both = dataclasses.replace(client, data=ClientData(lambda: rows, Rows, Rows))
        return Update(self.local(both, w) - w, self.weight(client), both.metrics)

    def params_for(self, state: FedFedState, client: ClientId) -> Params:  # type: ignore[override]
        return state.w


def sensitive(encode: Tensor, decode: Tensor, x: Tensor) -> Tensor:
    """x_s = x - q(x), q(x) = D E x, for rows x (n, d), E (r, d), D (d, r)."""
    return x - x @ encode.T @ decode.T


def others(shared: Mapping[ClientId, Labelled], client: ClientId, dim: int, seed: int) -> Labelled:
    """A sample of the rows that other clients shared. Its size is the number of rows that the client shared itself."""
    theirs = [s for c, s in shared.items() if c != client]
    if not theirs or client not in shared:
        return Labelled(torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64))
    x, y = torch.cat([s.x for s in theirs]), torch.cat([s.y for s in theirs])
    index = torch.from_numpy(seeds.generator(seed, "rows").permutation(len(y))[: len(shared[client].y)])
    return Labelled(x[index], y[index])


def _rms(x: Tensor) -> Tensor:
    """Root mean square of the entries; 1 if all are zero."""
    size = x.square().mean().sqrt()
    return torch.where(size > 0, size, torch.ones_like(size))
