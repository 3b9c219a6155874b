"""Client optimisers: how a client trains w between two messages. A method has its client optimiser as a field.

``SGD``, ``Adam``, ``AdamW`` and ``Proximal`` describe local training. :func:`fedfm.training.scheduler.train` chooses
how it is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedfm.core.checks import match
from fedfm.core.client import Client, Terms
from fedfm.core.fields import setting
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.models import precision
from fedfm.models.model import Model

SCHEDULES = ("constant", "linear", "cosine", "steps")
DROPS = (0.5, 0.8)  # schedule "steps": fractions of the run after which eta is divided by ten
DECAYS = ("weights", "all")  # the parameters that weight decay affects
ABSENT = {"keep": None, "zero": 0.0, "exclude": -math.inf}  # value that replaces the logit of an absent class


@dataclass(frozen=True)
class Local:
    """E epochs of mini-batch descent on one client's training rows; the optimiser's state is new in each round."""

    adaptations: ClassVar[tuple[str, ...]] = ()  # the supported adaptations; empty means all

    learning_rate: float = setting(0.1, "eta", gt=0, finite=True)
    epochs: int = setting(1, "E, passes over the client's rows per round", ge=1)
    batch_size: int = setting(32, "B", ge=1)
    weight_decay: float = setting(0.0, "L2 (sgd, adam) or decoupled (adamw)", ge=0, finite=True)
    decay_of: str = setting(
        "weights",
        "parameters to which weight_decay applies: weights (all except biases and norms, as in transformers' Trainer), "
        "or all, as in torch.optim",
        choices=DECAYS,
    )
    absent: str = setting(
        "keep",
        "logits of classes without training rows at the client: keep, zero (set to 0 in the local loss, "
        "FedBaF's Appendix A) or exclude (-infinity: left out of the softmax)",
        choices=tuple(ABSENT),
    )
    micro_batch: int = setting(
        0, "rows on the device at once: the gradients of a batch's parts are summed; 0: the complete batch", ge=0
    )
    max_grad_norm: float | None = setting(
        None, "the norm to which the gradient of a batch's loss is clipped [no clipping]", gt=0, finite=True
    )
    schedule: str = setting(
        "constant",
        "course of eta over all rounds: constant, linear or cosine (to 0 after the last round), or steps (a tenth "
        "after half of the rounds, a hundredth after four fifths)",
        choices=SCHEDULES,
    )
    warmup: float = setting(0.0, "share of all steps, at the beginning, in which eta rises from 0", ge=0, lt=1)
    warmup_steps: float = setting(
        0.0,
        "instead of warmup, as in transformers: number of a client's warm-up steps over all rounds; a value below 1 is "
        "their share of all the client's steps; the first step has eta = 0",
        ge=0,
        finite=True,
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
            mu, correction, only: see :class:`~fedfm.core.client.Terms`.
        """
        client.trained = client.trainer(client, w, self, Terms(mu, correction, only))
        return client.trained

    @property
    def personal(self) -> bool:
        """Whether each client keeps its own model (see :meth:`own`)."""
        return False

    @property
    def passes(self) -> int:
        """Epochs over the client's rows in a round, summed over the models that the client trains."""
        return self.epochs

    @property
    def stepwise(self) -> bool:
        """Whether clients cannot train as one batch, because eta varies between steps or :attr:`looks` is true."""
        varies = self.warmup or self.warmup_steps or self.schedule != "constant"
        return self.looks or bool(varies)

    @property
    def looks(self) -> bool:
        """Whether a step sums its gradient over parts of the batch, or clips the gradient."""
        return bool(self.micro_batch or self.max_grad_norm)

    def rate(self, begin: float, end: float, steps: int = 0) -> float:
        """Eta of a step from ``begin`` to ``end``, two fractions (0 <= begin < end <= 1) of a run of ``steps`` steps.

        Eta rises linearly until the end of the warm-up. Then it depends on the schedule. ``constant``: it stays.
        ``linear``: it falls linearly. ``cosine``: it falls as in Loshchilov and Hutter's SGDR without restarts.
        ``steps``: it falls to a tenth at each of :data:`DROPS`. Eta depends only on round and step.
        """
        warmup, at = self.warmup, end
        if self.warmup_steps:  # as get_linear_schedule_with_warmup of transformers: in step k of c, eta k / c
            count = int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(steps * self.warmup_steps)
            warmup, at = count / steps, begin
        if begin < warmup:
            return self.learning_rate * min(1.0, at / warmup)
        left = 1 - (begin - warmup) / (1 - warmup) if warmup < 1 else 0.0
        shares = {
            "constant": 1.0,
            "linear": left,
            "cosine": 0.5 - 0.5 * math.cos(math.pi * left),
            "steps": 0.1 ** sum(begin >= drop for drop in DROPS),
        }
        return self.learning_rate * shares[self.schedule]

    def shorten(self, *parts: Tensor) -> None:
        """Clip one gradient, given as one or several parts, in place to the norm :attr:`max_grad_norm`."""
        if self.max_grad_norm is not None:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            factor = (self.max_grad_norm / whole.norm()).clamp(max=1)
            for part in parts:
                part.mul_(factor)

    @property
    def spares_biases(self) -> bool:
        """Whether :attr:`weight_decay` leaves out biases and norms."""
        return bool(self.weight_decay) and self.decay_of != "all"

    @property
    def plain(self) -> Local:
        """The optimiser that trains only w, without a model of the client's own."""
        return self

    def own(self, client: Client, w: Params) -> Params:
        """The client's own model; ``w`` is the server's model for the client."""
        return w

    @contextmanager
    def apply(self, model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
        """Context manager: load w, a result of :meth:`own` or a model's parameters, and yield the rows to score."""
        model.load(w)
        yield rows

    def fits(self, model: Model) -> None:
        """Raise an InputError for a model that this optimiser cannot train."""
        precision.check_trainable(model.spec)
        if self.micro_batch and (wrong := model.mixes_rows):
            raise InputError(
                f"method.local.micro_batch: {wrong}, so that losses of parts of a batch do not add up; drop it",
                key="method.local.micro_batch",
            )

    def check_own(self, w: Params, model: Model) -> None:
        """Raise a ClientFault that names the first wrong tensor, if w is not a result that :meth:`own` can have."""
        match(w, model.layout, "model")

    def steps(self, n: int, model: Model | None = None) -> int:
        """Number of optimiser steps over n rows; without ``model``, the number for a model without batch norm."""
        return self.epochs * batches(n, self.batch_size, joins_last(model))


def joins_last(model: Model | None) -> bool:
    """Whether a last batch of one row joins the batch before it: batch norm needs more than one row."""
    return any(isinstance(m, _BatchNorm) for m in getattr(model, "train_too", ()))


def batches(n: int, size: int, joins: bool = False) -> int:
    """Number of mini-batches of n rows.

    Args:
        joins: whether a last batch of one row joins the batch before it (see :func:`joins_last`).

    Example:
        >>> batches(65, 32), batches(65, 32, joins=True), batches(1, 32, joins=True)
        (3, 2, 1)
    """
    count = -(-n // size)
    return count - 1 if joins and count > 1 and size > 1 and n % size == 1 else count


@runtime_checkable
class TrainsLocally(Protocol):
    """A method whose clients run a client optimiser."""

    @property
    def local(self) -> Local: ...


@dataclass(frozen=True)
class SGD(Local):
    """Stochastic gradient descent, optionally with (heavy-ball) momentum."""

    momentum: float = setting(0.0, "momentum of the local optimiser", ge=0, lt=1)


@dataclass(frozen=True)
class Adaptive(Local):
    """Settings of Adam and AdamW."""

    learning_rate: float = setting(0.001, "eta", gt=0, finite=True)
    betas: tuple[float, ...] = setting(
        (0.9, 0.999),
        "decay rates of the running means of gradients and of their squares",
        ge=0,
        lt=1,
        least=2,
        most=2,
        words="two numbers in [0, 1)",
    )
    epsilon: float = setting(1e-8, "added to the denominator", gt=0, finite=True)


@dataclass(frozen=True)
class Adam(Adaptive):
    """Adam; weight decay is added to the gradient."""


@dataclass(frozen=True)
class AdamW(Adaptive):
    """Adam with decoupled weight decay."""


@dataclass(frozen=True)
class Proximal(SGD):
    """SGD on FedProx's local objective f_k(v) + mu/2 ||v - w||^2, for any method with a local optimiser."""

    mu: float = setting(0.01, "weight of the squared distance to the start", ge=0)

    def __call__(self, client: Client, w: Params, *, mu: float = 0.0, **terms: Any) -> Params:
        """As :class:`Local`; the setting ``mu`` is added to the argument ``mu``."""
        return super().__call__(client, w, mu=mu + self.mu, **terms)
