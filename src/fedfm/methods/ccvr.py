"""CCVR: No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data.

Luo, Chen, Hu, Zhang, Liang, Feng. NeurIPS 2021. arXiv:2106.05001, Algorithm 1. Equation numbers are the paper's.

The last round calibrates; earlier rounds are FedAvg's. If only a head is trained, the features never change and earlier
rounds do not affect the calibrated head. Then one round, the default, is enough. Tukey's transform of the features is
left out, since it needs non-negative features. The server sees only what its aggregator discloses of the class sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Needs, Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.kept_sums import ChecksUpdates
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._convergence import Missed, tell
from fedfm.methods._one_shot import class_sums, rows_of, total_of
from fedfm.methods._opposite_sums import keep
from fedfm.methods._sums_of_rows import check_part, check_total, why_no_sums
from fedfm.methods.fedavg import FedAvg
from fedfm.models.model import Model
from fedfm.training.fit_head import HeadSpec, fit_rows


@dataclass(frozen=True)
class CCVR(ChecksUpdates, FedAvg):
    """FedAvg; then the head is trained again on virtual features, drawn from a Gaussian for each class."""

    needs: ClassVar[Needs] = Needs("head", one_class=True, bias=True)
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.covariance": Paper(
            "full", "a full covariance of few rows is singular; FedPFT's comparison also uses diag"
        ),
        "method.virtual": Paper(100),  # the number in FedPFT's comparison
    }

    rounds: int = setting(1, "the last round calibrates; earlier rounds are FedAvg's", ge=0)
    covariance: str = setting("diag", "covariance of a class: diag or full", choices=("diag", "full"))
    virtual: int = setting(100, "M_c, virtual features of each class", ge=1)
    head: HeadSpec = setting(HeadSpec(), "how the head is trained on virtual features")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """With one round, the moments are those of the frozen features of each client alone."""
        return Traits(last_round_differs=True, independent_messages=self.rounds == 1)

    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """Handlers whose replies are averaged: FedAvg's before the last round, then the handler of the calibration."""
        return ("train", "moments") if self.rounds > 1 else ("moments",)

    def init(self, fed: Federation) -> Params:
        _head_names(fed.model)
        return super().init(fed)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        if t < self.rounds:
            return super().step(fed, w, t)
        classes, dim = len(fed.model.classes), fed.model.feature_dim
        like = Params(self._sums(torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64), classes)).layout
        sums = total_of(fed, self.moments, like, w=w)
        check_total(fed, sums, why_no_sums)
        count, mu, sigma = pool(sums["count"], sums["total"], sums["second"])
        if not (seen := [c for c in range(classes) if count[c] > 0]):
            fed.notice("ccvr: the noise leaves no class any rows, so the head is not calibrated; use a larger epsilon")
            return w
        z = torch.cat([draw(mu[c], sigma[c], self.virtual, fed.seed_for("virtual", c)) for c in seen])
        labels = torch.tensor(seen).repeat_interleave(self.virtual)
        missed = Missed()
        found = fit_rows(z.float(), labels, classes, self.head, fed.seed_for("head"), missed)
        tell(fed, "server", missed.metrics)
        names = _head_names(fed.model)
        return w.replace({name: tensor.to(w[name].dtype) for name, tensor in zip(names, found, strict=True)})

    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        if handler == "moments":
            check_part(update, why_no_sums(update.delta))
            keep(fed, client, update.delta["count"], update.delta["total"])

    @on_client
    def moments(self, client: Client, w: Params) -> Update:
        """The count, sum and sum of squares (or of outer products) of each class's features under w."""
        client.model.load(w)
        return Update(Params(self._sums(*rows_of(client), len(client.model.classes))), 1.0)

    def _sums(self, x: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
        if self.covariance == "diag":
            second = class_sums(x.double().square(), y, classes)["total"]  # (C, d)
        else:
            rows, columns = torch.tril_indices(x.shape[1], x.shape[1])
            of = [x[y == c].double() for c in range(classes)]
            second = torch.stack([(z.T @ z)[rows, columns] for z in of])  # (C, d (d + 1) / 2)
        return class_sums(x, y, classes) | {"second": second}


def _head_names(model: Model) -> list[str]:
    """Names of the head's weight and bias in the trained parameters.

    Raises:
        InputError: the model has no head with a bias, or does not train its head.
    """
    head = getattr(model, "head", None)
    live = {id(tensor): name for name, tensor in model.live().items()}
    names = [live.get(id(getattr(head, part, None)), "") for part in ("weight", "bias")]
    if not all(names):
        raise InputError(
            "model: ccvr calibrates a trained linear head with a bias, and this model has none; "
            'model.adaptation = { name = "head" } gives one'
        )
    return names


def pool(count: Tensor, total: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The counts (C,), means (C, d) and covariances (C, d, d) over all clients; diagonal covariances are (C, d).

    Equations (3) and (4) pool the clients' means and unbiased covariances. Multiplied out, they give
    (N_c - 1) Sigma_c = sum x x^T - N_c mu_c mu_c^T, so the sums suffice. A class with one row has covariance 0.
    """
    n = count.clamp_min(1)[:, None]
    mu = total / n
    if second.shape == total.shape:
        return count, mu, ((second - n * mu.square()) / (n - 1).clamp_min(1)).clamp_min(0)
    rows, columns = torch.tril_indices(mu.shape[1], mu.shape[1])
    sigma = torch.zeros(*mu.shape, mu.shape[1], dtype=mu.dtype)
    sigma[:, rows, columns] = sigma[:, columns, rows] = second
    sigma = (sigma - n[:, None] * mu[:, :, None] * mu[:, None, :]) / (n - 1).clamp_min(1)[:, None]
    return count, mu, sigma


def draw(mu: Tensor, sigma: Tensor, m: int, seed: int) -> Tensor:
    """Draw m rows (m, d) from N(mu, sigma); negative eigenvalues, which rounding can cause, count as 0."""
    noise = torch.from_numpy(seeds.generator(seed, "noise").standard_normal((m, len(mu))))
    if sigma.dim() == 1:
        return mu + noise * sigma.sqrt()
    values, vectors = torch.linalg.eigh(sigma)
    root: Tensor = vectors * values.clamp_min(0).sqrt()
    return mu + noise @ root.T
