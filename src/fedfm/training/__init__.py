"""Client optimisers: what a client does with w between two messages. They are fields of methods.

``SGD``, ``Adam``, ``AdamW`` and ``Proximal`` describe local training; how it is computed - one client in a loop, a
cohort of heads as one batched product - is chosen by :func:`fedfm.training.cohort.train` and never changes what a
method reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property

from fedfm.errors import InputError, one_of
from fedfm.federation import Client
from fedfm.params import Params

ABSENT = {"keep": None, "zero": 0.0, "exclude": -math.inf}  # what takes the place of an absent class's logit


@dataclass(frozen=True)
class Local:
    """E epochs of mini-batch descent on one client's training rows; the state of the optimiser starts afresh each
    round.
    """

    learning_rate: float = field(default=0.1, metadata={"help": "eta"})
    epochs: int = field(default=1, metadata={"help": "E, passes over the client's rows a round"})
    batch_size: int = field(default=32, metadata={"help": "B"})
    weight_decay: float = field(default=0.0, metadata={"help": "L2 (sgd, adam) or decoupled (adamw)"})
    absent: str = field(
        default="keep",
        metadata={
            "help": "logits of classes without training rows at the client: keep, zero (set to 0 in the local loss, "
            "FedBaF's Appendix A) or exclude (-infinity: left out of the softmax)"
        },
    )

    def __call__(
        self,
        client: Client,
        w: Params,
        *,
        mu: float = 0.0,
        correction: Params | None = None,
        only: tuple[str, ...] | None = None,
    ) -> Params:
        """Train from ``w``; return the trained parameters.

        Args:
            mu: weight of the proximal term mu/2 ||v - w||^2 in the local objective.
            correction: added to every gradient (SCAFFOLD's c - c_k).
            only: names of the tensors that move, the others stay as they are in ``w``; None: all.
        """
        from fedfm.training.cohort import train
        from fedfm.training.job import Job

        client.trained = train(Job(client, w, self, mu, correction, only))
        return client.trained

    @property
    def personal(self) -> bool:
        """Whether it leaves each client with a model of its own, which the client keeps (see :meth:`own`)."""
        return False

    def own(self, client: Client, w: Params) -> Params:
        """The client's own model, where ``w`` is what the server has for it."""
        return w

    def steps(self, n: int) -> int:
        """Number of optimiser steps over n rows."""
        return self.epochs * -(-n // self.batch_size)

    def validate(self, where: str) -> None:
        """Refuse values that make no sense, naming the key."""
        for key, ok, right in (
            ("learning_rate", self.learning_rate > 0, "a number above 0"),
            ("epochs", self.epochs >= 1, "a whole number of at least 1"),
            ("batch_size", self.batch_size >= 1, "a whole number of at least 1"),
            ("weight_decay", self.weight_decay >= 0, "a number of at least 0"),
        ):
            if not ok:
                raise InputError(f"{where}.{key} = {getattr(self, key)}: expected {right}")
        if self.absent not in ABSENT:
            raise InputError(f'{where}.absent = "{self.absent}": expected "keep", "zero" or "exclude"')


@dataclass(frozen=True)
class SGD(Local):
    """Stochastic gradient descent, optionally with (heavy-ball) momentum."""

    momentum: float = field(default=0.0, metadata={"help": "of the local optimiser"})

    def validate(self, where: str) -> None:
        """Also 0 <= momentum < 1."""
        super().validate(where)
        if not 0 <= self.momentum < 1:
            raise InputError(f"{where}.momentum = {self.momentum}: expected a number in [0, 1)")


@dataclass(frozen=True)
class Adam(Local):
    """Adam with its usual constants (0.9, 0.999, 1e-8); weight decay enters the gradient."""

    learning_rate: float = field(default=0.001, metadata={"help": "eta"})


@dataclass(frozen=True)
class AdamW(Local):
    """Adam with decoupled weight decay."""

    learning_rate: float = field(default=0.001, metadata={"help": "eta"})


@dataclass(frozen=True)
class Proximal(SGD):
    """SGD on the local objective f_k(v) + mu/2 ||v - w||^2 (FedProx's), for any method that has a local optimiser."""

    mu: float = field(default=0.01, metadata={"help": "weight of the squared distance to the start"})

    def __call__(
        self,
        client: Client,
        w: Params,
        *,
        mu: float = 0.0,
        correction: Params | None = None,
        only: tuple[str, ...] | None = None,
    ) -> Params:
        """As :class:`SGD`, with this mu added to the method's own."""
        return super().__call__(client, w, mu=mu + self.mu, correction=correction, only=only)

    def validate(self, where: str) -> None:
        """Also mu >= 0."""
        super().validate(where)
        if self.mu < 0:
            raise InputError(f"{where}.mu = {self.mu}: expected a number of at least 0")


@dataclass(frozen=True)
class Ditto(Local):
    """Beside w, as the optimiser below trains it, the client trains v_k on f_k(v) + lambda/2 ||v - w||^2 and keeps it.

    Ditto: Fair and Robust Federated Learning Through Personalization. Li, Hu, Beirami, Smith. ICML 2021, Algorithm 1.
    """

    lambda_: float = field(default=0.1, metadata={"help": "pull of the client's own model to what the server sent"})
    optimiser: str = field(default="sgd", metadata={"help": "of both models: sgd, adam or adamw"})
    momentum: float = field(default=0.0, metadata={"help": "of sgd"})

    @property
    def personal(self) -> bool:
        """It does."""
        return True

    @cached_property
    def plain(self) -> Local:
        """The optimiser of w alone."""
        same = {f.name: getattr(self, f.name) for f in fields(Local)}
        return SGD(**same, momentum=self.momentum) if self.optimiser == "sgd" else BY_NAME[self.optimiser](**same)

    def __call__(
        self,
        client: Client,
        w: Params,
        *,
        mu: float = 0.0,
        correction: Params | None = None,
        only: tuple[str, ...] | None = None,
    ) -> Params:
        """Train w; in ``client.memory``, v as well."""
        v = client.memory.get("v", w)
        # lambda (v - w) = lambda (v - v_start) + lambda (v_start - w): a pull to the start, and a constant.
        v = self.plain(client, v, mu=self.lambda_, correction=self.lambda_ * (v - w), only=only)
        client.memory["v"] = v
        return self.plain(client, w, mu=mu, correction=correction, only=only)

    def own(self, client: Client, w: Params) -> Params:
        """v_k; before the client has trained, w."""
        v: Params = client.memory.get("v", w)
        return v

    def validate(self, where: str) -> None:
        """Also lambda >= 0 and a known optimiser."""
        super().validate(where)
        if self.lambda_ < 0:
            raise InputError(f"{where}.lambda = {self.lambda_}: expected a number of at least 0")
        one_of(f"{where}.optimiser", self.optimiser, ("sgd", "adam", "adamw"))
        if self.momentum and self.optimiser != "sgd":
            raise InputError(f'{where}.momentum: only optimiser = "sgd" has one')
        self.plain.validate(where)


BY_NAME: dict[str, type[Local]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "proximal": Proximal, "ditto": Ditto}
