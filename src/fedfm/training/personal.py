"""Client optimisers with which each client keeps its own model: Ditto, and a second adapter in addition to LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

from fedfm import seeds
from fedfm.core.checks import match
from fedfm.core.client import Client
from fedfm.core.fields import setting
from fedfm.core.rows import Rows
from fedfm.errors import E_TENSORS, ClientFault, InputError
from fedfm.linalg.params import Params
from fedfm.models.adapters import experts
from fedfm.models.adapters.experts import Expert, mean_direction, pair
from fedfm.models.adapters.pair_names import GLOBAL, LOCAL, MIX, is_pair
from fedfm.models.model import Model
from fedfm.training.optimisers import SGD, Adam, AdamW, Local

_PLAIN: dict[str, type[Local]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


@dataclass(frozen=True)
class TwoModels(Local):
    """The client also trains a second model with the same optimiser and keeps it."""

    optimiser: str = setting("sgd", "optimiser of both models: sgd, adam or adamw", choices=tuple(_PLAIN))
    momentum: float = setting(0.0, "momentum of sgd", ge=0, lt=1)
    betas: tuple[float, ...] = setting(
        (0.9, 0.999), "betas of adam and adamw", ge=0, lt=1, least=2, most=2, words="two numbers in [0, 1)"
    )
    epsilon: float = setting(1e-8, "epsilon of adam and adamw", gt=0, finite=True)

    @property
    def passes(self) -> int:
        return 2 * self.epochs

    @property
    def personal(self) -> bool:
        return True

    @classmethod
    def of(cls, local: Local) -> Local:
        """An instance of this class with the settings of a plain optimiser; other optimisers are returned unchanged."""
        name = {SGD: "sgd", Adam: "adam", AdamW: "adamw"}.get(type(local))
        return local if name is None else cls(**{f.name: getattr(local, f.name) for f in fields(local)}, optimiser=name)

    @cached_property
    def plain(self) -> Local:
        kind = _PLAIN[self.optimiser]
        return kind(**{f.name: getattr(self, f.name) for f in fields(kind)})


@dataclass(frozen=True)
class DittoOptimiser(TwoModels):
    """The client trains w, and its own v_k on f_k(v) + lambda/2 ||v - w||^2.

    Ditto: Fair and Robust Federated Learning Through Personalization. Li, Hu, Beirami, Smith. ICML 2021, Algorithm 1.
    """

    lambda_: float = setting(0.1, "pull of the client's own model to the received one", ge=0)

    def __call__(self, client: Client, w: Params, *, only: tuple[str, ...] | None = None, **terms: Any) -> Params:
        """Train w, and v in ``client.memory``; the arguments are those of :class:`Local`."""
        v = client.memory.get("v", w)
        # lambda (v - w) = lambda (v - v_start) + lambda (v_start - w): a proximal term and a constant.
        client.memory["v"] = self.plain(client, v, mu=self.lambda_, correction=self.lambda_ * (v - w), only=only)
        return self.plain(client, w, only=only, **terms)

    def own(self, client: Client, w: Params) -> Params:
        """v_k, or w before the client has trained."""
        v: Params = client.memory.get("v", w)
        return v


@dataclass(frozen=True)
class DualAdapter(TwoModels):
    """The client sends the LoRA adapter w and keeps a second adapter of its own; its model is their weighted sum.

    Dual-Personalizing Adapter for Federated Foundation Models. Yang, Long, Shen, Jiang, Blumenstein. NeurIPS 2024.
    The second adapter v starts as the first w that the client receives. While v is trained, w is frozen, and the output
    is W x plus half of each adapter's output; w itself is trained alone. In predictions v has the share ``a``, and w
    has 1 - ``a``. For each row, ``a`` is lambda times the mean cosine between the row's last hidden state and the last
    hidden states of some training rows. These states are computed with v, and a negative ``a`` counts as 0. If a head
    is trained in addition to LoRA, it is mixed in the same way.

    With ``when = "after"`` v starts as the last w. Then every evaluation before the end trains a new v from the current
    w; ``run.evaluate_every = 0`` avoids that.
    """

    adaptations: ClassVar[tuple[str, ...]] = ("lora",)

    when: str = setting(
        "during",
        "when the client's own adapter is trained: during (in every round) or after (once at the end)",
        choices=("during", "after"),
    )
    weight: str = setting(
        "instance",
        "share of one adapter (see to): instance (by the row's similarity to training rows) or fixed (lambda)",
        choices=("instance", "fixed"),
    )
    lambda_: float = setting(0.5, "the largest share; with fixed weight, the share itself", ge=0, le=1)
    to: str = setting(
        "local",
        "adapter that gets this share: local (the client's own) or global (the shared one, as in the authors' code)",
        choices=("local", "global"),
    )
    instances: int = setting(5, "S, number of training rows with which a row is compared", ge=1)

    def __call__(self, client: Client, w: Params, *, only: tuple[str, ...] | None = None, **terms: Any) -> Params:
        """Train w, and the adapter v in ``client.memory``; the arguments are those of :class:`Local`."""
        if self.when == "during":
            client.memory["own_adapter"] = self.train_own(client, client.memory.get("own_adapter", w), w, only)
        return self.plain(client, w, only=only, **terms)

    def train_own(self, client: Client, v: Params, w: Params, only: tuple[str, ...] | None = None) -> Params:
        """The client's own adapter, trained from v; the frozen w adds its output."""
        with experts.experts(client.model, {GLOBAL: Expert(w, 0.5), LOCAL: Expert(weight=0.5)}):
            return self.plain(client, v, only=only)

    def own(self, client: Client, w: Params) -> Params:
        """w, v and their weights as one vector; only w while there is no v."""
        v = client.memory.get("own_adapter") if self.when == "during" else self._at_the_end(client, w)
        if v is None:
            return w
        sign, bias = (1.0, 0.0) if self.to == "local" else (-1.0, 1.0)  # the share of v is a, or 1 - a
        if self.weight == "fixed":
            return pair(w, v, bias + sign * self.lambda_)
        rows, rng = client.data.train, seeds.generator(client.seed, "instances")
        some = rng.choice(len(rows), min(self.instances, len(rows)), replace=False)
        client.model.load(v)
        m = mean_direction(client.model.last_states(rows.take(some)))
        return pair(w, v, bias, sign * self.lambda_ * m)

    def check_own(self, w: Params, model: Model) -> None:
        if not is_pair(w):
            super().check_own(w, model)
            return
        for name in (GLOBAL, LOCAL):
            match(w.part(name), model.layout, name)
        mix = {name: tuple(tensor.shape) for name, tensor in w.part(MIX).items()}
        width = None if model.last_layer is None else model.last_layer.in_features
        if mix not in ({"bias": ()}, {"bias": (), "slope": (width,)}):
            raise ClientFault(E_TENSORS, f"{MIX}: expected a bias, and a slope of {width} numbers; got {mix}")

    def _at_the_end(self, client: Client, w: Params) -> Params:
        """The adapter v, trained from a copy of w while w is frozen. It is trained once for each w, and then kept."""
        key = f"{client.seed} {w.sha256()}"
        if client.memory.get("of") != key:
            client.memory["of"], client.memory["own_adapter"] = key, self.train_own(client, w, w)
        v: Params = client.memory["own_adapter"]
        return v

    @contextmanager
    def apply(self, model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
        with experts.apply(model, w, rows) if is_pair(w) else super().apply(model, w, rows) as scored:
            yield scored

    def fits(self, model: Model) -> None:
        super().fits(model)
        if self.weight == "instance" and model.last_layer is None:
            raise InputError(
                'method.local.weight = "instance" compares the inputs of the last linear layer; this model has no last '
                'linear layer; expected "fixed"',
                key="method.local.weight",
            )
