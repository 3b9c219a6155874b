"""Base of the one-round methods on frozen features. It also packs several heads into one vector."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedfm.core.capabilities import Needs
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import InputError, RunError
from fedfm.linalg.params import Layout, Params
from fedfm.methods._convergence import Missed, tell
from fedfm.models.model import Model
from fedfm.training.fit_head import NOBODY, HeadSpec, fit_rows


@dataclass(frozen=True)
class OneShot(Method[Params]):
    """One round on the features of a frozen backbone. The server state is the model's trained head."""

    needs: ClassVar[Needs] = Needs("head", ("head",), one_class=True, bias=True)

    rounds: int = setting(
        1, "the method takes 1 round; 0 evaluates the initial model", ge=0, le=1, words="1, it takes one round"
    )

    def init(self, fed: Federation) -> Params:
        need_head(fed.model)
        return fed.initial

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w


@dataclass(frozen=True)
class OwnHeads(OneShot):
    """Every client trains its own head; each subclass combines these heads in its own way."""

    head: HeadSpec = setting(HeadSpec(), "how heads are trained")

    @on_client
    def fit(self, client: Client) -> Update:
        """Train the client's own head w_k, with weight n_k. A class without rows gets the bias ``NOBODY``."""
        x, y = rows_of(client)
        missed = Missed()
        w, b = fit_rows(x, y, len(client.model.classes), self.head, client.seed, missed)
        return Update(head_of(client.model, w, b), len(y), missed.metrics)

    def ask_heads(self, fed: Federation) -> list[Update]:
        """Ask every client for its head."""
        replies = fed.ask(self.fit, like=fed.initial.layout)
        for client, update in replies.items():
            tell(fed, client, update.metrics)
        return list(replies.values())


def rows_of(client: Client) -> tuple[Tensor, Tensor]:
    """(features (n, d), labels (n,)) of the training rows; runs the backbone unless the features are cached."""
    rows = client.data.train
    if rows.labels is None:
        raise ValueError("training a head needs labelled rows")
    return client.model.features(rows), rows.labels


def need_head(model: Model, *, bias: bool = True) -> None:
    """Refuse a model whose trainable part is not a linear head; by default the head must have a bias.

    Raises:
        InputError: the model trains another part; the error names the part that it should train.
    """
    head = getattr(model, "head", None)
    if getattr(model, "adaptation", None) != "head" or head is None:
        raise InputError(
            'model.adaptation: the method trains a linear head on frozen features; expected { name = "head" }',
            key="model.adaptation",
        )
    if bias and head.bias is None:
        raise InputError("model: the method fits a linear head with a bias, and this head has none; expected a bias")


def head_of(model: Model, w: Tensor, b: Tensor) -> Params:
    """A head's parameters from W (C, d) and b (C,), with the names and dtypes of the model."""
    return Params({n: (w if n.endswith("weight") else b).to(dtype) for n, dtype, _ in model.layout.entries})


def tensors_of(head: Params) -> tuple[Tensor, Tensor]:
    """(W, b) of a head, float32."""
    weight, bias = sorted(head, key=lambda name: not name.endswith("weight"))
    return head[weight].float(), head[bias].float()


def zeros_for_unseen(head: Params) -> Params:
    """Replace the bias ``NOBODY`` by 0, the value that training from zero gives, so that heads can be averaged."""
    return Params({name: torch.where(tensor <= NOBODY / 2, 0.0, tensor) for name, tensor in head.items()})


def class_sums(x: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """For each class the number of rows ``count`` (C,) and the sum of their features ``total`` (C, d), in float64."""
    member = torch.nn.functional.one_hot(y, classes).double()  # (n, C)
    return {"count": member.sum(0), "total": member.T @ x.double()}


def as_heads(*heads: Params) -> Params:
    """Pack several heads into one vector. The heads' names are numbers, since a client's name may contain a slash."""
    return Params.join(**{f"{i:06d}": head for i, head in enumerate(heads)})


def each_head(w: Params) -> list[tuple[Tensor, Tensor]]:
    """(W, b) of each head in a vector from :func:`as_heads`, in order."""
    names = list(w)  # the weight and the bias of a head follow each other
    return [tensors_of(Params({name: w[name] for name in names[i : i + 2]})) for i in range(0, len(names), 2)]


def combine(heads: Sequence[tuple[Tensor, Tensor]], x: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The heads' log-probabilities of rows x, combined by ``how``: (n, C), in float64 so that ties are rare."""
    x = x.double()
    logp = (torch.log_softmax(torch.addmm(b.double(), x, w.double().T), 1) for w, b in heads)
    return functools.reduce(how, logp)


def mean_probability(model: Model, w: Params, rows: Rows) -> Tensor:
    """Logarithm of (1/K) sum_k p_k(c|x), (n, C)."""
    heads = each_head(w)
    total = combine(heads, model.features(rows), torch.logaddexp)
    return (total - torch.tensor(float(len(heads))).log()).float()


def total_of(fed: Federation, handler: Callable[..., Any], like: Layout, **payload: Any) -> Params:
    """The sum of the clients' messages, all of weight 1: their mean times :func:`clients_in_mean`."""
    mean = fed.mean(handler, like=like, **payload)
    return clients_in_mean(fed) * mean


def clients_in_mean(fed: Federation) -> int:
    """Number of clients in the last mean, if all messages have weight 1.

    Under secure aggregation a client without an update sends zeros of weight 0, so ``fed.heard``, which counts its
    message, is too large. A sum by ``fed.heard`` would be larger than its noise covers.

    Raises:
        RunError: hidden weights do not add up to a number of clients.
    """
    weight: float = fed.heard
    if fed.aggregator.transport.form != "plain":
        from fedfm.aggregation._secagg import WEIGHT

        weight = fed.process_memory[WEIGHT]
        if weight != round(weight) or weight > fed.heard:  # a rounded weight would scale the others' sums
            raise RunError(f"round {fed.round}: a client sent its part of the sum with another weight than 1")
    return round(weight)
