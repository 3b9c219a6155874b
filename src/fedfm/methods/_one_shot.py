"""What the baselines of one round on frozen features share: rows, heads, several heads as one vector, settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Needs
from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg.params import Params
from fedfm.methods._convergence import Missed
from fedfm.models.model import Model
from fedfm.training.fit_head import NOBODY, HeadSpec, fit_rows


@dataclass(frozen=True)
class OneShot(Method[Params]):
    """One round on the features of a frozen backbone: the state is what predicts."""

    needs: ClassVar[Needs] = Needs("head", ("head",))

    rounds: int = setting(1, "1; 0 evaluates the start", ge=0, le=1, words="1, it takes one round")

    def init(self, fed: Federation) -> Params:
        need_head(fed.model)
        return fed.initial

    def params_for(self, w: Params, client: ClientId) -> Params:
        return w


@dataclass(frozen=True)
class OwnHeads(OneShot):
    """Every client trains a head of its own; subclasses say what becomes of them."""

    head: HeadSpec = setting(HeadSpec(), "how heads are trained")

    @on_client
    def fit(self, client: Client) -> Update:
        """The client's own head w_k and n_k; a class that it has not seen gets the bias NOBODY."""
        x, y = rows_of(client)
        missed = Missed()
        w, b = fit_rows(x, y, len(client.model.classes), self.head, client.seed, missed)
        return Update(head_of(client.model, w, b), len(y), missed.metrics)


def rows_of(client: Client) -> tuple[Tensor, Tensor]:
    """(features (n, d), labels (n,)) of the training rows; runs the backbone where the features are not cached."""
    rows = client.data.train
    if rows.labels is None:
        raise ValueError("a head is trained on labelled rows")
    return client.model.features(rows), rows.labels


def need_head(model: Model) -> None:
    """Refuse a model of which more, or less, than a linear head with a bias is trained.

    Raises:
        InputError: what would be right.
    """
    bias = getattr(getattr(model, "head", None), "bias", None)
    if getattr(model, "adaptation", None) != "head" or len(model.names) != 2 or bias is None:
        raise InputError(
            'model.adaptation: the method trains a linear head on frozen features; expected { name = "head" }'
        )


def head_of(model: Model, w: Tensor, b: Tensor) -> Params:
    """W (C, d) and b (C,) under the model's names and in its dtype."""
    return Params({n: (w if n.endswith("weight") else b).to(dtype) for n, dtype, _ in model.layout.entries})


def tensors_of(head: Params) -> tuple[Tensor, Tensor]:
    """(W, b) of a head, float32."""
    weight, bias = sorted(head, key=lambda name: not name.endswith("weight"))
    return head[weight].float(), head[bias].float()


def zeros_for_unseen(head: Params) -> Params:
    """NOBODY replaced by 0, where training from zero leaves a class without rows: fit to be averaged."""
    return Params({name: torch.where(tensor <= NOBODY / 2, 0.0, tensor) for name, tensor in head.items()})


def passes(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Row numbers of every mini-batch in turn, each epoch in an order of its own."""
    rng = seeds.generator(seed, "batches")
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(n))
        for start in range(0, n, batch_size):
            yield order[start : start + batch_size]


def class_sums(x: Tensor, y: Tensor, classes: int) -> dict[str, Tensor]:
    """``count`` (C,) and ``total`` (C, d) = sum of the features of each class, in float64: sums of them stay exact."""
    member = torch.nn.functional.one_hot(y, classes).double()  # (n, C)
    return {"count": member.sum(0), "total": member.T @ x.double()}


def as_heads(*heads: Params) -> Params:
    """Several heads as one vector; numbered, because names of clients may hold slashes."""
    return Params.join(**{f"{i:06d}": head for i, head in enumerate(heads)})


def each_head(w: Params) -> Iterator[tuple[Tensor, Tensor]]:
    """(W, b) of the heads of :func:`as_heads`, in order."""
    names = list(w)  # two tensors a head, side by side
    for i in range(0, len(names), 2):
        yield tensors_of(Params({name: w[name] for name in names[i : i + 2]}))


def combined(heads: Sequence[tuple[Tensor, Tensor]], x: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(n, C): the heads' log-probabilities of x, folded by ``how``; in float64, where ties are rare."""
    x, out = x.double(), None
    for w, b in heads:
        logp = torch.log_softmax(torch.addmm(b.double(), x, w.double().T), 1)
        out = logp if out is None else how(out, logp)
    if out is None:
        raise ValueError("no heads")
    return out


def mean_probability(model: Model, w: Params, rows: Rows) -> Tensor:
    """Logarithm of (1/K) sum_k p_k(c|x), (n, C)."""
    heads = list(each_head(w))
    total = combined(heads, model.features(rows), torch.logaddexp)
    return (total - torch.tensor(float(len(heads))).log()).float()


def same_shape(fed: Federation) -> Callable[[Update], None]:
    """Refuses a head of another model."""
    return lambda update: match(update.delta, fed.initial.layout, "head")
