"""Base of the methods that aggregate LoRA exactly.

It has the common settings, each client's rank, local training at that rank, the weights p_k and the sum Delta W.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from fedfm.core.capabilities import Needs, Predictor
from fedfm.core.client import Client, ClientId, Update, each
from fedfm.core.federation import Federation
from fedfm.core.fields import setting
from fedfm.core.method import Method, S
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.linalg import low_rank
from fedfm.linalg.low_rank import Factors
from fedfm.linalg.params import Params
from fedfm.methods._client_ranks import client_ranks
from fedfm.methods._weights import WEIGHTINGS, WORDS, weight_of
from fedfm.models.adapters import lora
from fedfm.models.model import Model
from fedfm.training import SGD, Local


class Term(NamedTuple):
    """A client's part in the aggregate: the weight p_k (all p_k sum to 1) and the trained parameters of rank r_k."""

    p: float
    w: Params


@dataclass(frozen=True)
class ExactLora(Predictor, Method[S]):
    """One model for all clients. Each round adds Delta W = sum_k p_k s_k B_k A_k to every adapted module.

    Here s_k = alpha / r_k. Clients may have different ranks r_k; the model's rank is at least the largest of them. The
    ranks of all updates add up, so the aggregated Delta W may have a higher rank than the model's adapter.
    """

    asks: ClassVar[tuple[str, ...]] = ("train",)

    rounds: int = setting(10, "communication rounds; 0 evaluates the initial model", ge=0)
    fraction: float = setting(1.0, "C, the fraction of clients that a round asks", gt=0, le=1)
    weighting: str = setting("size", f"p_k: {WORDS}", choices=WEIGHTINGS)
    local: Local = setting(SGD(), "client optimiser: E, B, eta")
    ranks: tuple[int, ...] = setting(
        (),
        "r_k: ranks of the clients, in the order of their names; a shorter list is repeated [model.adaptation.rank]",
        ge=1,
    )

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """LoRA whose rank is at least the clients' largest rank."""
        return Needs(adaptations=("lora",), ranks=self.ranks)

    def weight(self, client: Client) -> int:
        """Client half: a value proportional to p_k."""
        return weight_of(client, self.weighting)

    def ranks_of(self, fed: Federation) -> dict[ClientId, int]:
        """Each client's rank r_k.

        Raises:
            InputError: a rank exceeds that of the model's adapter.
        """
        lora.need(fed.model, experts=True)
        return client_ranks(self.ranks or (fed.model.adaptation_spec.rank,), fed)

    @contextmanager
    def install(self, model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
        with lora.apply(model, w):
            yield rows

    def validate(self) -> None:
        if self.local.adaptations:
            raise InputError(
                'method.local.name = "dual_adapter": this method cannot aggregate two adapters; take a plain '
                "optimiser, e.g. sgd",
                key="method.local.name",
            )


@dataclass(frozen=True)
class Merged:
    """Server state of a method that adds each round's aggregate to the frozen weights.

    Attributes:
        w: the model's trainable parameters: its adapter, and its head if the head is new.
        shift: sum of the changes to the frozen weights so far, as factors (:func:`as_params`); empty at the start.
        alpha: LoRA's alpha.
    """

    w: Params
    shift: Params
    alpha: float


@dataclass(frozen=True)
class Merging(ExactLora[Merged]):
    """A method that adds each round's aggregate to the frozen weights."""

    def init(self, fed: Federation) -> Merged:
        self.ranks_of(fed)  # refuses invalid ranks before the first round
        return Merged(fed.initial, Params({}), lora.alpha_of(fed.model))

    def params_for(self, state: Merged, client: ClientId) -> Params:
        return lora.merge(state.w, as_factors(state.shift), state.alpha)


def terms(fed: Federation, handler: Any, starts: Mapping[ClientId, Params], **payload: Any) -> list[Term]:
    """Ask clients to train from ``starts``; a reply of a wrong shape excludes its client from the round."""
    like = each({c: start.layout for c, start in starts.items()})
    replies: dict[ClientId, Update] = fed.ask(handler, of=starts, like=like, **payload)
    n = sum(update.weight for update in replies.values())
    return [Term(update.weight / n, starts[c] + update.delta) for c, update in replies.items()]


def delta_w(found: Sequence[Term], alpha: float) -> dict[str, Factors]:
    """For each module, Delta W = sum_k p_k s_k B_k A_k as factors: [p_k s_k B_k]_k (d_out, R) and [A_k]_k (R, d_in)."""
    products = [(term.p, lora.factors(term.w, alpha)) for term in found]
    return {path: low_rank.stack([(p, x[path]) for p, x in products]) for path in products[0][1]}


def average(found: Sequence[Term], names: Sequence[str]) -> dict[str, Tensor]:
    """The weighted mean sum_k p_k w_k of the named tensors, as in FedAvg."""
    return {n: sum(t.p * t.w[n].double() for t in found).to(found[0].w[n].dtype) for n in names}  # type: ignore[union-attr]


def add(shift: Params, more: Mapping[str, Factors]) -> Params:
    """The exact sum of ``shift`` and ``more``, factored anew, so that no column belongs to a single client."""
    before = as_factors(shift)
    sums = {path: low_rank.stack([(1.0, before[path]), (1.0, x)] if before else [(1.0, x)]) for path, x in more.items()}
    return as_params({path: low_rank.compress(x) for path, x in sums.items()})


def as_params(shift: Mapping[str, Factors]) -> Params:
    """Pack the factors of all modules into one float32 vector; :func:`as_factors` is the inverse."""
    return Params({f"{path}/{part}": t.float() for path, x in shift.items() for part, t in zip("UV", x, strict=True)})


def as_factors(shift: Params) -> dict[str, Factors]:
    """Factors (U, V) of each module, from the vector of :func:`as_params`."""
    return {name[:-2]: (shift[name], shift[f"{name[:-2]}/V"]) for name in shift if name.endswith("/U")}
