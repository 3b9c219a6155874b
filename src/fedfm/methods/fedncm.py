"""FedNCM: Guiding The Last Layer in Federated Learning with Pre-Trained Models.

Legate, Bernier, Caccia, Oyallon, Belilovsky. NeurIPS 2023. arXiv:2306.03937, Algorithm 1 without its fine-tuning.

Each client sends one message with each class's number of rows and sum of features. The nearest class mean is
a linear head: argmin_c ||x - mu_c||^2 = argmax_c 2 mu_c x - ||mu_c||^2, hence W = 2 mu, b = -||mu||^2. With the cosine,
W = mu / ||mu|| and b = 0. The head's softmax is not a calibrated probability. The server sees what its aggregator
discloses of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.kept_sums import KeepsSums, with_sums
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import OneShot, class_sums, clients_in_mean, head_of, rows_of
from fedfm.methods._opposite_sums import keep
from fedfm.methods._sums_of_rows import check_part, check_total, why_no_sums
from fedfm.models.model import Model
from fedfm.training.fit_head import NOBODY


@dataclass(frozen=True)
class FedNCM(KeepsSums, OneShot):
    """One round: clients send class sums and counts; the server computes the nearest-class-mean head."""

    traits: ClassVar[Traits] = Traits(independent_messages=True)
    means: ClassVar[tuple[str, ...]] = ("sums",)

    distance: str = setting(
        "euclidean", "distance to the class means: euclidean or cosine", choices=("euclidean", "cosine")
    )

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        classes, dim = len(fed.model.classes), fed.model.feature_dim
        like = Params({"count": torch.zeros(classes), "total": torch.zeros(classes, dim)}).layout
        mean = fed.mean(self.sums, like=like)  # the mean has a factor 1/K, which cancels
        total = clients_in_mean(fed) * mean
        check_total(fed, total, why_no_sums)
        return with_sums(self._head(fed.model, mean), total)

    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        check_part(update, why_no_sums(update.delta))
        keep(fed, client, update.delta["count"], update.delta["total"])

    def _head(self, model: Model, sums: Params) -> Params:
        return head_of(model, *nearest_mean(sums["count"], sums["total"], self.distance))

    @on_client
    def sums(self, client: Client) -> Update:
        found = class_sums(*rows_of(client), len(client.model.classes))
        return Update(Params({name: tensor.float() for name, tensor in found.items()}), 1.0)

    def own_sums(self, client: Client, seed: int) -> Params:
        return self.sums(client).delta

    def state_of(self, model: Model, total: Params, seed: int) -> Params:
        return with_sums(self._head(model, total), total)


def nearest_mean(count: Tensor, total: Tensor, distance: str) -> tuple[Tensor, Tensor]:
    """W (C, d) and b (C,) from counts (C,) and sums (C, d), which may have a common factor; a class without rows is
    never chosen.
    """
    mu = total / torch.where(count > 0, count, 1.0)[:, None]
    if distance == "cosine":
        w, b = torch.nn.functional.normalize(mu, dim=1), torch.zeros_like(count)
    else:
        w, b = 2 * mu, -mu.square().sum(1)
    return w, torch.where(count > 0, b, b.min() + NOBODY)  # below every other class, for features of any scale
