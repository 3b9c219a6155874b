"""Survey: what the silos hold, by one round of sums. Nothing is trained, and the result is figures, not a model.

The analysis of variance of pooled rows from sums: Chan, Golub, LeVeque. The American Statistician 37, 1983, equations
2.1. Between-silo shares of the spread: Light, Margolin. JASA 66, 1971. There is no Algorithm to cite; the noise is that
of Balle, Wang (arXiv:1805.06530), or shares of it (arXiv:2102.06387).

Each silo sends sums over its training rows: memberships in groups (targets, lengths of texts, sizes of pictures, what
is missing), and features of the model, divided by their norm. :mod:`._survey_sums` has the sums, their sensitivity and
their checks; :mod:`._survey_figures` the figures and the rules of the risks.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedfm.core.capabilities import Judge, Needs, Private, Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.kept_sums import ChecksUpdates
from fedfm.core.method import Method
from fedfm.errors import E_FIELD, ClientFault, Faults, InputError, RunError
from fedfm.linalg.params import Layout, Params
from fedfm.methods import _survey_figures as figures
from fedfm.methods import _survey_sums as sums
from fedfm.methods._one_release import check_sums, spent_by_sums
from fedfm.methods._one_shot import total_of
from fedfm.methods._opposite_sums import keep, name_opposite
from fedfm.methods._sums_of_rows import check_part
from fedfm.methods._survey_sums import FEATURES, SILOS, TARGETS, Array, SurveyBlock
from fedfm.models.model import Model
from fedfm.privacy.accountant import Accountant
from fedfm.privacy.spec import PrivacySpec, need
from fedfm.tasks._row_survey import RowProperty, bin_names, into_bins, properties_of

_MOST_BY_CLASS = 1 << 21  # largest number of entries of the sums of features by class: 16 MiB a message
_FARTHEST = (0.01, 0.03, 0.1, 0.3, 1.0)  # edges of bins of a silo's distance
_APART = "silos_by_distance"


@dataclass(frozen=True)
class SurveyNoise:
    """The noise of the one release under (epsilon, delta), for one row more or less; the message has sensitivity 1.

    Attributes:
        shared: whether each silo adds a share of the noise to a hidden sum; else each adds all of it to its own.
    """

    epsilon: float
    delta: float
    shared: bool = False

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on each entry of the message."""
        if self.shared:
            from fedfm.privacy.composition import noise_multiplier_for_concentrated

            return noise_multiplier_for_concentrated(self.epsilon, self.delta)
        from fedfm.privacy import gaussian

        return gaussian.sigma_for(self.epsilon, self.delta)


@dataclass(frozen=True)
class SurveyState:
    """The unchanged model, and the figures as JSON; the sums themselves are not kept."""

    w: Params
    found: str


@dataclass(frozen=True)
class Survey(ChecksUpdates, Private, Method[SurveyState]):
    """One round: silos send sums over their rows, and the server computes figures and risks from them."""

    noise: ClassVar[SurveyNoise | None] = None  # protect() sets it on an instance
    noise_by: ClassVar[str] = "silo"
    needs: ClassVar[Needs] = Needs()
    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, hides_counts=True, figures_only=True)

    rounds: int = setting(1, "the survey takes 1 round", ge=1, le=1, words="1, it takes one round")
    min_count: int = setting(
        10,
        "a silo with fewer training rows sends zeros, and smaller counts are hidden; under [privacy] the noise does "
        "this",
        ge=1,
    )
    by_silo: bool = setting(
        False, "true: the server sees each silo's sums, checks them, and reports distances by silo; not under [privacy]"
    )
    tell_silos: bool = setting(
        False, "true: a second message tells each silo its own distance from the others, which only its log shows"
    )
    features: bool = setting(True, "whether moments of the model's features are surveyed, by a pass over the rows")
    by_class: bool = setting(
        True, "whether features are also summed by class, for drift within classes; not under [privacy]"
    )
    length_bins: tuple[int, ...] = setting(
        (32, 128, 512, 2048, 8192), "edges of bins for the number of characters of a text", ge=1, least=1, most=64
    )
    side_bins: tuple[int, ...] = setting(
        (32, 64, 128, 224, 512, 1024), "edges of bins for the sides of pictures in pixels", ge=1, least=1, most=64
    )
    norm_bins: tuple[float, ...] = setting(
        (0.1, 1.0, 10.0, 100.0, 1000.0), "edges of bins for the norm of features", gt=0, finite=True, least=1, most=64
    )
    most_rows: int = setting(10_000_000, "largest number of rows that a silo may count", ge=1, le=10**9)

    # --- client half --------------------------------------------------------------------------------------------------
    @on_client
    def sums(self, client: Client) -> Update:
        """The silo's sums, for a mean."""
        return Update(self._message(client), 1.0)

    @on_client
    def tell(self, client: Client) -> Update:
        """The silo's sums, which the server sees."""
        return Update(self._message(client), 1.0)

    @on_client
    def compare(self, client: Client, mean: Tensor, variance: float) -> Update:
        """Log the silo's distance from the mean of features (d,) of all silos, and count it in its bin.

        The distance is |m_k - m|^2 divided by the variance of all rows.
        """
        bins = np.zeros(len(_FARTHEST) + 1)
        count = len(_rows_of(client))
        if count >= self.min_count:
            own = sums.unit_features(_features(client).double().numpy()).mean(0)
            distance = float(((own - mean.numpy()) ** 2).sum()) / max(variance, 1e-12)
            bins = into_bins(np.array([distance]), _FARTHEST)[0]
            client.log(
                f"survey: this silo's mean of features is at the squared distance {distance:.4g} from that of all "
                f"rows, in units of their variance; {1 / count:.4g} is expected by chance"
            )
        return Update(Params({"bins": torch.from_numpy(bins)}), 1.0)

    def _message(self, client: Client) -> Params:
        table, plan = _rows_of(client), self._plan(client.model)
        if self.noise is None and len(table) < self.min_count:
            layout = self._layout(client.model)
            return Params({name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in layout.entries})
        members = {of.name: of.members(table) for of in plan.properties}
        if plan.dimension:
            x = _features(client).double().numpy()
            members["norm"] = into_bins(np.linalg.norm(x, axis=1), self.norm_bins)
            members[FEATURES] = sums.unit_features(x)
        if self.noise is not None:
            found = sums.scaled_sums(members, len(table), plan.blocks)
            return _params(self._noisy(client, members, found, self.noise))
        found = sums.sums_of(members, len(table))
        if plan.classes:
            found |= sums.sums_by_class(members[FEATURES], members[TARGETS])
        return _params(found)

    def _noisy(
        self, client: Client, members: dict[str, Array], found: dict[str, Array], noise: SurveyNoise
    ) -> dict[str, Array]:
        """The message with normal noise; if the noise is shared, the aggregation's mechanism adds the silo's share."""
        from fedfm.methods._one_release import key_of_release
        from fedfm.privacy.noise import cover, digest

        rows = np.concatenate([*members.values()], axis=1)
        key = key_of_release(client, "Survey", rows, rows[:, :0], f"{self}{noise}", noise.delta)
        if noise.shared:
            return found
        purpose = f"{client.id}/{noise}/{digest(*found.values())}"
        return {name: cover(key, f"{purpose}/{name}", value, noise.sigma) for name, value in found.items()}

    # --- server half --------------------------------------------------------------------------------------------------
    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        why = None
        if handler == "sums" and self.noise is None:
            why = sums.fault_of(_arrays(update.delta), self._plan(fed.model).blocks, 1, self.most_rows)
        check_part(update, why)
        _keep(fed, client, update.delta)

    def init(self, fed: Federation) -> SurveyState:
        return SurveyState(fed.initial, "")

    def params_for(self, state: SurveyState, client: ClientId) -> Params:
        return state.w

    def step(self, fed: Federation, state: SurveyState, t: int) -> SurveyState:
        plan, layout = self._plan(fed.model), self._layout(fed.model)
        parts: dict[ClientId, dict[str, Array]] = {}
        if self.by_silo:

            def check(update: Update) -> None:
                if why := sums.fault_of(_arrays(update.delta), plan.blocks, 1, self.most_rows):
                    raise ClientFault(E_FIELD, why)

            replies = fed.ask(self.tell, like=layout, check=check)
            parts = {client: _arrays(update.delta) for client, update in replies.items()}
            for client, update in replies.items():
                _keep(fed, client, update.delta)
            total = {name: np.sum([part[name] for part in parts.values()], axis=0) for name in layout.slots}
        else:
            total = _arrays(total_of(fed, self.sums, layout))
        heard = fed.heard
        if self.noise is not None:
            total, silos = sums.unscaled_sums(total, plan.blocks), heard
        else:
            if why := sums.fault_of(total, plan.blocks, heard, self.most_rows):
                raise RunError(f"round {t}: a silo sent false sums: {why}; without hidden sums it would be left out")
            silos = round(float(total[SILOS][0]))
            if fed.aggregator.transport.form != "plain" and silos == 1:
                raise RunError(
                    f"round {t}: one silo alone has method.min_count = {self.min_count} rows, so the hidden sums would "
                    "be its own"
                )
        name_opposite(fed)
        deviations = None if self.noise is None else self._deviations(plan.blocks, heard, self.noise)
        found = figures.figures_of(total, plan.blocks, silos, self.min_count, deviations, by_silo=bool(parts))
        found["silos_without_sums"] = heard - silos
        if parts:
            found["by_silo"] = figures.silo_figures(parts, plan.blocks, self.min_count)
        if self.tell_silos and FEATURES in found:
            about = found[FEATURES]
            layout = Params({"bins": torch.zeros(len(_FARTHEST) + 1, dtype=torch.float64)}).layout
            mean = torch.tensor(about["mean"], dtype=torch.float64)
            bins = _arrays(total_of(fed, self.compare, layout, mean=mean, variance=about["variance"]))["bins"]
            if bool((bins < -1e-6).any()) or bins.sum() > fed.heard + 1e-6:
                raise RunError(f"round {t}: a silo sent a false distance")
            found[_APART] = {"groups": list(bin_names(_FARTHEST)), "counts": [round(float(n)) for n in bins]}
        return SurveyState(state.w, json.dumps(found))

    def details(self, state: SurveyState, judge: Judge | None) -> dict[str, Any]:
        found = json.loads(state.found) if state.found else None
        if found and FEATURES in found:  # the checkpoint has its mean
            del found[FEATURES]["mean"]
        return {"survey": found} if found else {}

    def _deviations(self, blocks: tuple[SurveyBlock, ...], silos: int, noise: SurveyNoise) -> dict[str, float]:
        """Standard deviations of the noise: on an entry of a sum (``count``), and on the spread of each block.

        Shares have at most twice the variance that is stated.
        """
        sigma, scale = noise.sigma * math.sqrt(2.0 if noise.shared else silos), sums.SurveyScale.of(blocks)
        found = {block.name: sigma * block.spread_bound / scale.spread for block in blocks}
        return found | {"count": sigma / scale.row}

    # --- what both halves know ----------------------------------------------------------------------------------------
    def _plan(self, model: Model) -> _SurveyPlan:
        properties = properties_of(model, self.length_bins, self.side_bins)
        blocks = [SurveyBlock(of.name, of.groups, len(of.groups), of.most) for of in properties]
        d = _dimension(model) if self.features else 0
        if d:
            names = bin_names(self.norm_bins)
            blocks += [SurveyBlock("norm", names, len(names), 1), SurveyBlock(FEATURES, (), d, 1)]
        targets = next((block for block in blocks if block.name == TARGETS), None)
        wanted = self.by_class and d > 0 and self.noise is None and targets is not None and targets.most == 1
        classes = targets.size if wanted and targets is not None and targets.size * d <= _MOST_BY_CLASS else 0
        return _SurveyPlan(properties, tuple(blocks), d, classes)

    def _layout(self, model: Model) -> Layout:
        plan = self._plan(model)
        return sums.layout_of(plan.blocks, plan.classes, noisy=self.noise is not None)

    # --- settings -----------------------------------------------------------------------------------------------------
    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """The sums, unless the server sees each silo's, and the message that tells silos their distance."""
        more = ("compare",) if self.tell_silos and self.noise is None else ()
        return more if self.by_silo else ("sums", *more)

    @property
    def asks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The sums, if the server sees each silo's."""
        return ("tell",) if self.by_silo else ()

    def validate(self) -> None:
        for key in ("length_bins", "side_bins", "norm_bins"):
            edges = getattr(self, key)
            if any(a >= b for a, b in itertools.pairwise(edges)):
                raise InputError(f"method.{key} = {list(edges)}: expected ascending edges", key=f"method.{key}")
        if self.tell_silos and not self.features:
            raise InputError(
                "method.tell_silos = true: a silo's distance is one of features; set method.features = true",
                key="method.tell_silos",
            )

    def settle(self, privacy: PrivacySpec | None) -> Self:
        return self

    def protect(self, privacy: PrivacySpec) -> Self:
        faults = Faults()
        check_sums(privacy, "survey", faults)
        for key in ("by_silo", "tell_silos"):
            if getattr(self, key):
                faults.say(f"method.{key} = true: [privacy] covers one release of sums; drop it", key=f"method.{key}")
        faults.refuse()
        epsilon, delta = need(privacy.target_epsilon, "target_epsilon"), need(privacy.delta, "delta")
        method = copy.copy(self)
        object.__setattr__(method, "noise", SurveyNoise(epsilon, delta, privacy.mechanism == "distributed_gaussian"))
        return method

    @property
    def shared_sigma(self) -> float | None:
        """See :class:`fedfm.aggregation._record_shares.SharesNoise`."""
        return self.noise.sigma if self.noise is not None and self.noise.shared else None

    def spend(self, accountant: Accountant) -> None:
        if self.noise is None:
            return
        it = self.noise
        accountant.compose(spent_by_sums("survey", it.epsilon, it.delta, 1.0, it.sigma, shared=it.shared))


@dataclass(frozen=True)
class _SurveyPlan:
    """What a model's rows are surveyed for; ``dimension`` d of features, and ``classes`` by which they are summed."""

    properties: tuple[RowProperty, ...]
    blocks: tuple[SurveyBlock, ...]
    dimension: int
    classes: int


def _rows_of(client: Client) -> Any:
    """The table of the client's training rows."""
    if client.data.table is None:
        raise ValueError("this party's rows have no table")
    return client.data.table()


def _dimension(model: Model) -> int:
    """The length d of :func:`_features`; 0 if the model has none, or if rows are joined into blocks."""
    if any(map(model.task.packs, model.task.kinds)):
        return 0
    dual = getattr(model, "dual", None)
    if dual is not None:
        return int(dual.config.projection_dim)
    texts_alone = model.task.is_language_model and not model.task.images_in_texts
    layer = model.head if model.head is not None else model.last_layer if texts_alone else None
    return 0 if layer is None else int(layer.in_features)


def _features(client: Client) -> Tensor:
    """Features (n, d) of the client's training rows: the inputs of the model's head, or its last hidden states."""
    model, rows = client.model, client.data.train
    plain = model.head is not None or "features" in rows.tensors or hasattr(model, "dual")
    return model.features(rows) if plain else model.last_states(rows)


def _keep(fed: Federation, client: ClientId, found: Params) -> None:
    """Keep the class means of a silo, if features are summed by class."""
    if (total := found.get(f"{sums.BY_CLASS}.sum")) is not None:
        keep(fed, client, found[f"{TARGETS}.sum"], total)


def _arrays(w: Params) -> dict[str, Array]:
    return {name: np.asarray(tensor.numpy(), dtype=np.float64) for name, tensor in w.items()}


def _params(found: dict[str, Array]) -> Params:
    return Params({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in found.items()})
