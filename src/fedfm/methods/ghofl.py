"""GHOFL: The Gaussian-Head OFL Family: One-Shot Federated Learning from Client Global Statistics.

Turazza, Picone, Mamei. ICLR 2026. arXiv:2602.01186. Algorithm GH-OFL-CF: the closed-form heads GH-NBdiag, GH-LDA and
GH-QDAfull. FisherMix and Proto-Hyper, which the paper trains on draws from these Gaussians, are left out.

Clients send for each class the count N_c and the sum A_c of features, and second moments: B = sum x x^T over all rows
(lda), the squares D_c (nb) or S_c = sum x x^T of each class (qda). The moments are sums, so the heads are the same for
every partition: mu_c = A_c / N_c, Sigma = (B - sum_c N_c mu_c mu_c^T) / (N - C), Sigma_c = (S_c - N_c mu_c mu_c^T) /
(N_c - 1), and var_c = D_c / N_c - mu_c^2. Covariances are shrunk to (1 - alpha) Sigma + alpha tr(Sigma) / d I. The
server sees what its aggregator discloses of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Predictor, Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.kept_sums import KeepsSums, with_sums
from fedfm.core.rows import Rows
from fedfm.linalg.params import Params
from fedfm.methods._one_shot import OneShot, class_sums, head_of, need_head, rows_of, total_of
from fedfm.methods._opposite_sums import keep
from fedfm.methods._sums_of_rows import check_part, check_total, why_no_sums
from fedfm.models.model import Model
from fedfm.training.fit_head import NOBODY

_LEAST = 1e-6  # smallest variance, as in the authors' code


@dataclass(frozen=True)
class GHOFL(KeepsSums, Predictor, OneShot):
    """One round: clients send moments of features by class; the server computes a Gaussian classifier from them.

    The head ``lda`` is linear. The others are quadratic, so the result is not a single model for an export.
    """

    traits: ClassVar[Traits] = Traits(independent_messages=True)
    means: ClassVar[tuple[str, ...]] = ("moments",)

    form: str = setting(
        "lda",
        "lda: one covariance for all classes; nb: a diagonal one for each class; qda: a full one for each class",
        choices=("lda", "nb", "qda"),
    )
    shrinkage: float = setting(0.05, "alpha, the weight of a spherical covariance; nb has none", ge=0, le=1)

    def init(self, fed: Federation) -> Params:
        need_head(fed.model)
        if self.one_head:
            return fed.initial
        C, d = len(fed.model.classes), fed.model.feature_dim
        scale = torch.zeros((C, d) if self.form == "nb" else (C, d, d))
        return Params({"mean": torch.zeros(C, d), "scale": scale, "bias": torch.zeros(C)})

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        C, d = len(fed.model.classes), fed.model.feature_dim
        like = moments_of(torch.zeros(0, d), torch.zeros(0, dtype=torch.int64), C, self.form).layout
        total = total_of(fed, self.moments, like)
        check_total(fed, total, why_no_sums)
        return self.state_of(fed.model, total, fed.seed)

    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        check_part(update, why_no_sums(update.delta))
        keep(fed, client, update.delta["count"], update.delta["total"])

    def state_of(self, model: Model, total: Params, seed: int) -> Params:
        found = gaussians(total, self.form, self.shrinkage)
        if self.one_head:
            head = head_of(model, *linear_head(found["mean"], found["covariance"], found["log_prior"]))
        else:
            w = quadratic_head(found["mean"], found["covariance"], found["log_prior"])
            head = Params({name: tensor.float() for name, tensor in w.items()})
        return with_sums(head, total)

    @property
    def one_head(self) -> bool:
        return self.form == "lda"

    def own_sums(self, client: Client, seed: int) -> Params:
        return self.moments(client).delta

    @on_client
    def moments(self, client: Client) -> Update:
        """Counts and sums of each class's features, and the second moments of ``form``, float64."""
        return Update(moments_of(*rows_of(client), len(client.model.classes), self.form), 1.0)

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        if self.one_head:
            model.load(w)
            scores: Tensor = model.predict(rows)
            return scores
        return quadratic_logits(w, model.features(rows)).float()


def moments_of(x: Tensor, y: Tensor, classes: int, form: str) -> Params:
    """``count`` (C,), ``total`` (C, d) and ``second`` of features x (n, d) with classes y (n,), float64.

    ``second`` is B (d (d + 1) / 2,), D (C, d) or S (C, d (d + 1) / 2); symmetric matrices are lower triangles.
    """
    x = x.double()
    if form == "nb":
        second = class_sums(x.square(), y, classes)["total"]
    else:
        rows, columns = torch.tril_indices(x.shape[1], x.shape[1])
        parts = [x] if form == "lda" else [x[y == c] for c in range(classes)]
        second = torch.stack([(z.T @ z)[rows, columns] for z in parts])
        second = second[0] if form == "lda" else second
    return Params(class_sums(x, y, classes) | {"second": second})


def gaussians(sums: Params, form: str, shrinkage: float) -> Params:
    """``mean`` (C, d), ``log_prior`` (C,) and ``covariance`` of the sums of all clients.

    ``covariance`` is (d, d) for lda, the variances (C, d) for nb and (C, d, d) for qda. A class of at most one row has
    the pooled covariance of the others in qda. A class without rows has ``log_prior`` -inf; if noise leaves no class
    any rows, all classes are as likely.
    """
    n, second = sums["count"].clamp_min(0), sums["second"]  # noise can make a count negative
    mu = sums["total"] / n.clamp_min(1)[:, None]
    if form == "nb":
        covariance = (second / n.clamp_min(1)[:, None] - mu.square()).clamp_min(_LEAST)
    else:
        outer = n[:, None, None] * mu[:, :, None] * mu[:, None, :]  # (C, d, d)
        scatter = unpack(second, mu.shape[1]) - (outer.sum(0) if form == "lda" else outer)
        pooled = scatter if form == "lda" else scatter.sum(0)
        covariance = pooled / (n.sum() - (n > 0).sum()).clamp_min(1)
        if form == "qda":
            few = (n <= 1)[:, None, None]
            covariance = torch.where(few, covariance, scatter / (n - 1).clamp_min(1)[:, None, None])
        covariance = shrink(covariance, shrinkage)
    log_prior = (n / n.sum().clamp_min(1)).log() if n.any() else torch.zeros_like(n)
    return Params({"mean": mu, "covariance": covariance, "log_prior": log_prior})


def unpack(lower: Tensor, d: int) -> Tensor:
    """The symmetric matrices (..., d, d) of packed lower triangles (..., d (d + 1) / 2)."""
    rows, columns = torch.tril_indices(d, d)
    found = lower.new_zeros(*lower.shape[:-1], d, d)
    found[..., rows, columns] = found[..., columns, rows] = lower
    return found


def shrink(covariance: Tensor, alpha: float) -> Tensor:
    """(1 - alpha) Sigma + alpha tr(Sigma) / d I, plus the smallest variance on the diagonal, of (..., d, d)."""
    d = covariance.shape[-1]
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return (1 - alpha) * covariance + (alpha * mean + _LEAST) * torch.eye(d, dtype=covariance.dtype)


def linear_head(mu: Tensor, covariance: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
    """W (C, d) and b (C,) of LDA: Sigma^-1 mu_c and -mu_c^T Sigma^-1 mu_c / 2 + log pi_c."""
    root, _ = inverse_root(covariance)
    w = mu @ root @ root
    return w, _with_nobody(-0.5 * (w * mu).sum(1) + log_prior)


def quadratic_head(mu: Tensor, covariance: Tensor, log_prior: Tensor) -> Params:
    """``mean``, ``scale`` and ``bias`` of the logits bias_c - ||scale_c (x - mu_c)||^2 / 2, for nb and qda.

    ``scale`` is the inverse of the standard deviations (C, d), or of the roots of the covariances (C, d, d).
    """
    if covariance.dim() == 2:
        scale = covariance.rsqrt()
        half = scale.log().sum(1)  # -log det / 2
    else:
        scale, half = inverse_root(covariance)
    return Params({"mean": mu, "scale": scale, "bias": _with_nobody(log_prior + half)})


def inverse_root(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Sigma^(-1/2) (..., d, d) and -log det Sigma / 2 (...), of symmetric matrices.

    Eigenvalues below the smallest variance, as noise on the sums gives them, count as this variance.
    """
    values, vectors = torch.linalg.eigh(covariance)
    scale = values.clamp_min(_LEAST).rsqrt()
    return (vectors * scale[..., None, :]) @ vectors.mT, scale.log().sum(-1)


def quadratic_logits(w: Params, x: Tensor) -> Tensor:
    """The logits (n, C) of a quadratic head for features x (n, d), float64."""
    mu, scale, bias = (w[name].double() for name in ("mean", "scale", "bias"))
    found = []
    for c in range(len(mu)):
        z = x.double() - mu[c]
        z = z * scale[c] if scale.dim() == 2 else z @ scale[c].T
        found.append(bias[c] - 0.5 * z.square().sum(1))
    return torch.stack(found, 1)


def _with_nobody(bias: Tensor) -> Tensor:
    """The biases, where a class without rows is far below every other one."""
    known = bias.isfinite()
    return torch.where(known, bias, bias[known].min() + NOBODY)
