"""Analytic: AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained Models.

He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang. CVPR 2025. arXiv:2405.16240. Equation numbers are the paper's.

Ridge regression of the targets on frozen features has a closed solution in two sums over rows, C = sum x x^T and
b = sum x y^T. The paper aggregates local solutions by its law of equation (9) and removes the clients' regularisation
by equation (16). The result is the pooled solution (C + gamma I)^-1 b, so here clients send the sums themselves, and
the server solves once, as in Algorithm 1. The result is the same for every partition, and sums also pass through
secure aggregation. Random features make the fit non-linear, as in SAFLe (arXiv:2512.03336). Projected features make
the sums small where d is large: W is sought among the combinations of ``width`` random directions.

The server sees what its aggregator discloses of the sums. C of fewer rows than features reveals these rows up to a
rotation, so hide the sums by secure aggregation or cover them by [privacy].
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Needs, Predictor, Private, Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.kept_sums import SEED, KeepsSums, with_sums
from fedfm.core.rows import Rows
from fedfm.errors import E_FIELD, ClientFault, Faults, InputError, RunError
from fedfm.linalg.params import Params
from fedfm.methods._one_release import check_sums, spent_by_sums
from fedfm.methods._one_shot import OneShot, head_of, need_head, total_of
from fedfm.methods._opposite_sums import keep
from fedfm.methods._sums_of_rows import check_part, check_total, why_no_counts, why_no_sums
from fedfm.models.head_inputs import UNIT_NORM
from fedfm.models.model import Model
from fedfm.privacy.accountant import Accountant
from fedfm.privacy.noise import Array, project, unit_rows, unpack
from fedfm.privacy.spec import PrivacySpec, need

_RANDOM, _PROJECTED = 1024, 64  # random combinations of features, unless ``width`` sets another number
_ROUNDING = 1e-6  # tolerance of eigenvalues below 0: sums are float64, or fixed-point under secure aggregation
_NO_ROWS = "no rows can have the clients' sums, so a client has sent false ones"
_GRID = 2.0**12  # shared noise: entries of a row are multiples of 1 / _GRID, so its products are exact


@dataclass(frozen=True)
class Noise:
    """The noise of one release under (epsilon, delta), for one row more or less.

    A row x of norm at most 1 and its one-hot y change C by x x^T and b by x y^T. Both have norm at most 1, so the
    sensitivity of the two together is sqrt(2).

    Attributes:
        shared: whether each client adds a share of the noise to a hidden sum; else each adds all of it to its own.
    """

    epsilon: float
    delta: float
    shared: bool = False

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on b and on the diagonal of C.

        On other entries of C it is 1/sqrt(2) of this value; if the noise is shared, it is the same on all entries.
        """
        if self.shared:
            from fedfm.privacy.composition import noise_multiplier_for_concentrated

            return math.sqrt(2) * noise_multiplier_for_concentrated(self.epsilon, self.delta)
        from fedfm.privacy import gaussian

        return gaussian.sigma_for(self.epsilon, self.delta, math.sqrt(2))

    def spectral_norm(self, clients: int, d: int) -> float:
        """About the largest singular value of the noise on C (d, d): 2 s sqrt(d), s the deviation off the diagonal."""
        if self.shared:  # the shares of all clients together have at most twice the variance that is stated
            return 2 * self.sigma * math.sqrt(2 * d)
        return self.sigma * math.sqrt(2 * clients * d)


@dataclass(frozen=True)
class Analytic(KeepsSums, Predictor, Private, OneShot):
    """One round: clients send sums over their rows, and the server solves the ridge regression of all rows.

    Classification's targets y are 1 for the row's class and 0 for the others; multi_label's are 1 and -1; regression's
    are scaled. The intercept is not regularised, except under [privacy]. The scores are not calibrated probabilities.
    """

    noise: ClassVar[Noise | None] = None  # protect() sets it on an instance
    noise_by: ClassVar[str] = "silo"

    ridge: float = setting(1.0, "gamma, the weight of |W|^2 next to the sum of squared errors", ge=0, finite=True)
    features: str = setting(
        "linear",
        "linear: the model's features; random: ReLU of random combinations; projected: random combinations, with "
        "smaller sums",
        choices=("linear", "random", "projected"),
    )
    width: int = setting(
        0, f"number of random combinations; 0 means {_RANDOM}, projected {_PROJECTED}", ge=0, le=1 << 14
    )
    class_weights: str = setting(
        "none", "balanced: all classes count the same, whatever their numbers of rows", choices=("none", "balanced")
    )

    # --- client half --------------------------------------------------------------------------------------------------
    @on_client
    def count(self, client: Client) -> Update:
        """The number of rows of each class, (C,)."""
        return Update(Params({"count": _targets(client).sum(0)}), 1.0)

    @on_client
    def sums(self, client: Client, seed: int, weights: Tensor) -> Update:
        """Lines 2 and 3: C_k = sum x x^T, packed as a lower triangle, and b_k = sum x y^T.

        Args:
            seed: the seed of the random features.
            weights: (C,) the weight of a row of each class, above 0; (0,) if the method weights no classes.

        Raises:
            ClientFault: the weights do not fit the method; under [privacy] they would scale the rows above the noise.
        """
        expected = 0 if self.class_weights == "none" else len(client.model.classes)
        if weights.shape != (expected,) or not bool((weights > 0).all()):
            raise ClientFault(
                E_FIELD, f"weights: expected {expected} numbers above 0, since class_weights = {self.class_weights!r}"
            )
        x, y = self._inputs(client.model.features(client.data.train), seed), _targets(client)
        if self.noise is not None and not self.noise.shared:
            return Update(self._noisy(client, x, y, self.noise), 1.0)
        if self.noise is not None:  # the aggregation's mechanism adds the share
            self._key_of(client, x, y, self.noise)
        return Update(_sums_of(x, y, (y @ weights)[:, None] if len(weights) else torch.ones(1)), 1.0)

    def _noisy(self, client: Client, x: Tensor, y: Tensor, noise: Noise) -> Params:
        """The sums with normal noise; the key of the noise never leaves the client."""
        from fedfm.privacy.noise import cover, digest, packed_scale

        key = self._key_of(client, x, y, noise)
        exact = {name: tensor.numpy() for name, tensor in _sums_of(x, y, torch.ones(1)).items()}
        scales: dict[str, float | Array] = {"C": noise.sigma * packed_scale(x.shape[1]), "b": noise.sigma}
        purpose = f"{client.id}/{noise}/{digest(*exact.values())}"  # both parts: none is released alone
        return Params(
            {name: torch.from_numpy(cover(key, f"{purpose}/{name}", exact[name], scales[name])) for name in exact}
        )

    def _key_of(self, client: Client, x: Tensor, y: Tensor, noise: Noise) -> bytes:
        from fedfm.methods._one_release import key_of_release

        return key_of_release(client, "Analytic", x.numpy(), y.numpy(), f"{self}{noise}", noise.delta)

    def _inputs(self, x: Tensor, seed: int) -> Tensor:
        """The inputs (n, D + 1) of the regression, float64: features, and a constant.

        Under [privacy] their norm is 1; if the noise is shared, they are rounded towards 0.
        """
        x = torch.cat([self._features(x, seed), torch.ones(len(x), 1)], 1)
        if self.noise is None:
            return x
        x = x / math.sqrt(2)
        return (x * _GRID).trunc() / _GRID if self.noise.shared else x

    def _features(self, x: Tensor, seed: int) -> Tensor:
        """The features (n, D) of the regression, float64, of the model's features x (n, d)."""
        x = x.double()
        if self.features != "linear":
            x = x @ _projection(seed, x.shape[1], self._width)
        if self.features == "random":
            x = x.relu()
        return x if self.noise is None else torch.from_numpy(unit_rows(x.numpy()))

    # --- server half --------------------------------------------------------------------------------------------------
    @property
    def _width(self) -> int:
        return self.width or (_RANDOM if self.features == "random" else _PROJECTED)

    @property
    def one_head(self) -> bool:
        """Whether the result is a head of the model; else it is weights of other features."""
        return self.features == "linear" or (self.features == "projected" and self.noise is None)

    @property
    def shared_sigma(self) -> float | None:
        """See :class:`fedfm.aggregation._record_shares.SharesNoise`."""
        return self.noise.sigma if self.noise is not None and self.noise.shared else None

    def init(self, fed: Federation) -> Params:
        need_head(fed.model)
        if self.one_head:
            return fed.initial
        outputs = len(fed.model.classes)
        return self._head(fed.model, np.zeros((outputs, self._width)), np.zeros(outputs), 0)

    def step(self, fed: Federation, w: Params, t: int) -> Params:
        outputs, seed = len(fed.model.classes), _feature_seed(fed.seed)
        weights = torch.zeros(0, dtype=torch.float64)
        if self.class_weights == "balanced":
            n = fed.mean(self.count, like=Params({"count": torch.zeros(outputs, dtype=torch.float64)}).layout)["count"]
            if not (n.min() >= 0 and n.max() > 0):
                raise RunError(f"{_NO_ROWS}: the numbers of rows of classes are {n.min():g} to {n.max():g} on average")
            weights = n.sum() / (outputs * n.clamp_min(n[n > 0].min()))
        d = 1 + (fed.model.feature_dim if self.features == "linear" else self._width)
        like = _sums_of(torch.zeros(0, d).double(), torch.zeros(0, outputs).double(), torch.ones(1)).layout
        total = total_of(fed, self.sums, like, seed=seed, weights=weights)
        if self.noise is None:
            check_total(fed, total, functools.partial(self._why_no_sums, fed.model))
        return self._state(fed.model, total, seed, fed.heard)

    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        if self.noise is None:
            count = handler == "count"
            why = why_no_counts(update.delta["count"]) if count else self._why_no_sums(fed.model, update.delta)
            check_part(update, why)
            if not count and self.class_weights == "none" and fed.model.task.one_class_a_row:
                b = update.delta["b"].T
                keep(fed, client, b[:, -1], b[:, :-1])

    def _why_no_sums(self, model: Model, sums: Params) -> str | None:
        """Why no rows have these sums: the last row of C has the number of rows, and that of b those of the classes."""
        C, b = sums["C"], sums["b"].T
        if self.class_weights != "none":
            return None  # the weights of the rows differ
        if not model.task.one_class_a_row:  # then all rows are one class
            b = torch.from_numpy(unpack(C.numpy(), b.shape[1]))[-1:]
        return why_no_sums({"count": b[:, -1], "total": b, "second": C})

    def _state(self, model: Model, total: Params, seed: int, clients: int = 1) -> Params:
        """The model of the sums over all clients, together with the sums and the seed of their features."""
        W, b = self.solve(total["C"].numpy(), total["b"].numpy(), clients)
        return Params({**with_sums(self._head(model, W, b, seed), total), SEED: torch.tensor(seed)})

    # --- a client that joins or leaves after training -----------------------------------------------------------------
    def own_sums(self, client: Client, seed: int) -> Params:
        return self.sums(client, seed=_feature_seed(seed), weights=torch.zeros(0, dtype=torch.float64)).delta

    def state_of(self, model: Model, total: Params, seed: int) -> Params:
        return self._state(model, total, _feature_seed(seed))

    def could_be_sums(self, total: Params) -> bool:
        """C of rows has no negative eigenvalue."""
        values = np.linalg.eigvalsh(unpack(total["C"].numpy(), len(total["b"])))
        return bool(values[0] >= -_ROUNDING * max(values[-1], 1.0))

    def solve(self, packed: Array, cross: Array, clients: int = 1) -> tuple[Array, Array]:
        """W (C, D) and intercept (C,) of the regression: (C + gamma I)^-1 b.

        Args:
            packed: ((D + 1)(D + 2) / 2,) the lower triangle of C; the last row belongs to the constant.
            cross: (D + 1, C) b.
            clients: the number of clients whose noise is in the sums.
        """
        C, penalty = unpack(packed, len(cross)), np.full(len(cross), self.ridge)
        if self.noise is None:
            penalty[-1] = 0.0
            found = _solve(C + np.diag(penalty), cross)
            return found[:-1].T, found[-1]
        noise = self.noise.spectral_norm(clients, len(cross))  # a smaller penalty would fit the noise
        found = _solve(project(C, 0.0) + np.diag(np.maximum(penalty, noise)), cross) / math.sqrt(2)
        return found[:-1].T, found[-1]

    def _head(self, model: Model, W: Array, b: Array, seed: int) -> Params:
        """The model's head, or W, b and the seed of the random features that they take."""
        weight, bias = torch.from_numpy(W), torch.from_numpy(b)
        if self.features == "projected" and self.one_head:
            weight = weight @ _projection(seed, model.feature_dim, self._width).T
        if self.one_head:
            return head_of(model, weight, bias)
        return Params({"weight": weight.float(), "bias": bias.float(), "seed": torch.tensor(seed)})

    # --- prediction ---------------------------------------------------------------------------------------------------
    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        if not self.one_head:
            x = self._features(model.features(rows), int(w["seed"]))
            return (x @ w["weight"].double().T + w["bias"].double()).float()
        model.load(w)
        if self.noise is not None:
            rows = Rows({"features": self._features(model.features(rows), 0).float()})
        scores: Tensor = model.predict(rows)
        return scores

    @property
    def feature_transform(self) -> str | None:
        return None if self.noise is None else UNIT_NORM

    # --- settings -----------------------------------------------------------------------------------------------------
    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """Class weights need rows with one class."""
        if self.class_weights == "none":
            return Needs("head", ("head",), row_targets=True, bias=True)
        because = 'method.class_weights = "balanced"'
        return Needs("head", ("head",), row_targets=True, bias=True, one_class=True, because=because)

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Class weights depend on all clients, and so do the sums that they weight."""
        return Traits(independent_messages=self.class_weights == "none")

    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """The sums, and before them the classes' numbers of rows if classes are weighted."""
        return ("sums",) if self.class_weights == "none" else ("count", "sums")

    def validate(self) -> None:
        if self.width and self.features == "linear":
            raise InputError(
                f'method.width = {self.width}: features = "linear" have no width; drop it', key="method.width"
            )

    def settle(self, privacy: PrivacySpec | None) -> Self:
        return self

    def protect(self, privacy: PrivacySpec) -> Self:
        faults = Faults()
        check_sums(privacy, "analytic", faults)
        if self.class_weights != "none":
            faults.say(
                f'method.class_weights = "{self.class_weights}": the numbers of rows would be another release; under '
                '[privacy] expected "none"',
                key="method.class_weights",
            )
        faults.refuse()
        epsilon, delta = need(privacy.target_epsilon, "target_epsilon"), need(privacy.delta, "delta")
        method = copy.copy(self)
        object.__setattr__(method, "noise", Noise(epsilon, delta, privacy.mechanism == "distributed_gaussian"))
        return method

    def spend(self, accountant: Accountant) -> None:
        if self.noise is None or not self.rounds:
            return
        it = self.noise
        accountant.compose(spent_by_sums("analytic", it.epsilon, it.delta, math.sqrt(2), it.sigma, shared=it.shared))


def _feature_seed(seed: int) -> int:
    """The seed of the random features in a run with this seed, which all clients take."""
    return seeds.derive(seed, "server", 1, "random features")


@functools.lru_cache(maxsize=1)
def _projection(seed: int, d: int, width: int) -> Tensor:
    """The matrix (d, width) of random combinations, kept for the calls of one run; its rows have variance 1/d."""
    drawn = seeds.generator(seed, "random features").standard_normal((d, width))
    return torch.from_numpy(drawn) / math.sqrt(d)


def _targets(client: Client) -> Tensor:
    """The targets (n, C) of the client's training rows, float64."""
    return client.model.task.head_targets(client.data.train, len(client.model.classes)).double()


def _sums_of(x: Tensor, y: Tensor, weight: Tensor) -> Params:
    """C, packed, and b of inputs x (n, D + 1) and targets y (n, C); ``weight`` is (n, 1) or (1,)."""
    rows, columns = torch.tril_indices(x.shape[1], x.shape[1])
    weighted = (weight * x).T
    return Params({"C": (weighted @ x)[rows, columns], "b": weighted @ y})


def _solve(matrix: Array, cross: Array) -> Array:
    """The solution of least norm, for a symmetric matrix; a RunError if an eigenvalue is negative beyond rounding."""
    try:
        factor = np.linalg.cholesky(matrix)
        return np.asarray(np.linalg.solve(factor.T, np.linalg.solve(factor, cross)))
    except np.linalg.LinAlgError:  # a singular matrix: no ridge, and fewer rows than features
        values = np.linalg.eigvalsh(matrix)
        if values[0] < -_ROUNDING * abs(values).max():
            raise RunError(f"{_NO_ROWS}: of x x^T, the smallest eigenvalue is {values[0]:.3g}") from None
        return np.asarray(np.linalg.lstsq(matrix, cross, rcond=None)[0])
