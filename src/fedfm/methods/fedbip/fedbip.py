"""FedBip: Bi-level Personalization for Federated Foundation Models: A Task-vector Aggregation Approach.

Yang, Long, Lu, Zhu, Jiang. AAAI 2026. arXiv:2509.12697, Algorithm 1: FedBip, and FedBip-L with weights for each layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from fedfm.core.capabilities import Comparable, Joinable, Judge, Needs, Personal, Predictor, Traits
from fedfm.core.client import Client, ClientId, Update, each, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import E_DUPLICATE, InputError, RunError
from fedfm.linalg.client_vectors import Vectors
from fedfm.linalg.params import Layout, Params, in_dtype, to_bytes
from fedfm.methods._client_ranks import client_ranks
from fedfm.methods.fedavg import FedAvg
from fedfm.methods.fedbip.task_vectors import Change, Entries, Products
from fedfm.methods.local import LocalOnly
from fedfm.models.adapters import lora
from fedfm.models.layers import GRANULARITIES
from fedfm.models.model import Model
from fedfm.training import SGD, Local, any_rank

LEAST = 0.1  # raw similarities with a smaller sum are refused, because they are divided by it


@dataclass(frozen=True)
class BipState:
    """Server state, by client.

    Attributes:
        theta: theta_i, the result of the client's last local training.
        theta_bar: theta_bar_i, the model from which its next local training starts.
        tau: the client's last task vector; clients that were never asked have none.
        p: ``p`` (L, K, K), the weights of the last round; the rows of clients that did not take part are zero.
        cut: for ``space = "product"``: the relative error, in Frobenius norm, of truncating aggregates to their ranks.
    """

    theta: dict[ClientId, Params]
    theta_bar: dict[ClientId, Params]
    tau: dict[ClientId, Params]
    p: Params
    layers: tuple[str, ...]
    cut: float = 0.0


@dataclass(frozen=True)
class FedBip(Personal, Predictor, Joinable, Comparable, Method[BipState]):
    """Each client gets its own aggregate: all task vectors, each weighted by its similarity to the client's own."""

    traits: ClassVar[Traits] = Traits(server_needs_weights_only=True, rows_by_optimiser=True)
    asks: ClassVar[tuple[str, ...]] = ("train",)
    paper: ClassVar[Mapping[str, Paper]] = {
        "method.rounds": Paper(10),  # on images; 20 on texts
        "method.fraction": Paper(1.0),
        "method.granularity": Paper("model"),
        "method.similarity": Paper("cosine"),
        "method.negative": Paper(
            "raw", "as printed, a client's similarities can have a sum of zero or less, which defines no mean"
        ),
        "method.weights_from": Paper("task_vector"),
        "method.aggregate": Paper("task_vector"),
        "method.space": Paper("factors"),
    }

    rounds: int = setting(10, "T, communication rounds; 0 evaluates the initial model", ge=0)
    fraction: float = setting(1.0, "the fraction of clients that a round asks", gt=0, le=1)
    local: Local = setting(SGD(), "client optimiser: E, B, eta")
    granularity: str = setting(
        "model",
        "parts with weights of their own: model (FedBip), layer (one per block, FedBip-L) or module",
        choices=GRANULARITIES,
    )
    similarity: str = setting(
        "cosine", "similarity g: cosine, pearson, or l2 (1/(1 + d/median d))", choices=("cosine", "pearson", "l2")
    )
    negative: str = setting(
        "clip",
        "how g is transformed: clip (max(0, g)), raw (unchanged) or softmax (exp(g/temperature))",
        choices=("clip", "raw", "softmax"),
    )
    temperature: float = setting(0.3, "temperature of softmax", gt=0)
    weights_from: str = setting(
        "task_vector", "vectors that g compares: task_vector or parameters", choices=("task_vector", "parameters")
    )
    aggregate: str = setting(
        "task_vector", "vectors that are summed: task_vector or parameters", choices=("task_vector", "parameters")
    )
    space: str = setting(
        "factors", "space of LoRA's task vectors: factors (A and B) or product (B A)", choices=("factors", "product")
    )
    ranks: tuple[int, ...] = setting(
        (),
        "for space = product: LoRA's ranks of the clients, in order of names; a shorter list is repeated "
        "[model.adaptation.rank]",
        ge=1,
    )
    absent: str = setting(
        "cached",
        "task vectors in the sums: present (only of the round's clients) or cached (also other clients' last ones)",
        choices=("cached", "present"),
    )
    transport: str = setting(
        "float32", "precision of task vectors: float32, or bfloat16 at half the bytes", choices=("float32", "bfloat16")
    )
    norm_cap: float | None = setting(None, "largest norm of a task vector, in units of the median norm", ge=1)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """LoRA, if the method computes with the products of LoRA's factors."""
        if self.space != "product":
            return Needs()
        return Needs(adaptations=("lora",), ranks=self.ranks, because='method.space = "product"')

    def init(self, fed: Federation) -> BipState:
        theta_pre = self.starting(fed)  # the same for all clients, also LoRA's A
        names, K = self.space_of(fed.model).layers, len(fed.clients)
        return BipState(theta_pre, theta_pre, {}, Params({"p": torch.zeros(len(names), K, K)}), tuple(names))

    def step(self, fed: Federation, s: BipState, t: int) -> BipState:
        theta_bar, space = Vectors(s.theta_bar), self.space_of(fed.model)
        like = each({i: self.wire_layout(w.layout) for i, w in theta_bar.items()})
        replies = fed.ask(self.train, of=fed.sample(self.fraction), like=like, theta_bar=each(theta_bar))  # lines 3-7
        now = Vectors({i: update.delta for i, update in replies.items()}).cast(theta_bar)  # tau_i, equation 3
        tau, theta = s.tau | now, s.theta | theta_bar + now
        pool = sorted(tau if self.absent == "cached" else now)  # clients whose vectors are summed
        x = [Change(tau[k], theta[k]) for k in pool]
        G = self.gram(space, x)
        p = self.weights(fed, G, {k: tau[k] for k in pool}, list(now))  # (L, |now|, |pool|)
        start, whole = [theta_bar[i] for i in now], self.aggregate == "parameters"
        found, cut = space.aggregates(p * self.factors(space, x, G), x, start, whole)  # lines 11 and 17
        mixed = s.theta_bar | dict(zip(now, found, strict=True))
        return BipState(theta, mixed, tau, spread(p, fed.clients, list(now), pool), s.layers, cut)

    @on_client
    def train(self, client: Client, theta_bar: Params) -> Update:
        theta = any_rank.fit(self.local, client, theta_bar)  # equation 2
        tau = theta - theta_bar  # equation 3; the sums are not weighted by n_k
        return Update(tau.cast(self.wire_layout(tau.layout)), 1.0, client.metrics)

    def wire_layout(self, layout: Layout) -> Layout:
        """Layout of a task vector in a message. bfloat16 preserves the cosines of task vectors, not of weights."""
        return in_dtype(layout, torch.bfloat16) if self.transport == "bfloat16" else layout

    def weights(
        self, fed: Federation, G: np.ndarray, tau: Mapping[ClientId, Params], now: Sequence[ClientId]
    ) -> np.ndarray:
        """The rows of p for the clients ``now``, (L, |now|, K), by equation 4, or for each layer by equation 6.

        If several task vectors are equal bit for bit, only one of them counts.
        """
        clients = list(tau)
        g, counts = similarities(G, self.similarity)
        # Cached vectors come first, since they are older.
        for k, of in copies({k: tau[k] for k in sorted(tau, key=lambda k: k in now)}):
            counts[:, :, clients.index(k)] = False
            if k in now:
                fed.exclude(
                    k,
                    E_DUPLICATE,
                    f"its task vector equals that of {of} bit for bit, and the sums use equal vectors only once",
                )
        p = shares(g, counts, self.negative, self.temperature)[:, [clients.index(i) for i in now]]
        if (bad := np.argwhere(~np.isfinite(p).all(2))).size:
            (at, i), layers = bad[0], list(self.space_of(fed.model).layers)
            raise RunError(
                f"round {fed.round}: the similarities of {now[i]} to all clients have a sum of less than {LEAST} in "
                f'{layers[at]}, and method.negative = "raw" divides by this sum; use "clip" or "softmax"'
            )
        return p

    def factors(self, space: Entries, x: Sequence[Change], G: np.ndarray) -> np.ndarray:
        """Factors (K,) by which ``norm_cap`` shortens each vector."""
        if self.norm_cap is None:
            return np.ones(len(x))
        known = self.weights_from == "task_vector" and self.similarity != "pearson"  # then G has the squared norms
        squares = np.einsum("lkk->k", G) if known else np.array([space.gram([change]).sum() for change in x])
        return cap_factors(squares, self.norm_cap)

    def gram(self, space: Entries, x: Sequence[Change]) -> np.ndarray:
        """Inner products (L, K, K) of the vectors that g compares."""
        return space.gram(x, self.weights_from == "parameters", self.similarity == "pearson")

    def space_of(self, model: Model) -> Entries:
        """The space in which task vectors are compared and summed."""
        return (Products if self.space == "product" else Entries)(model, self.granularity)

    def starting(self, fed: Federation) -> dict[ClientId, Params]:
        """theta_pre of each client; LoRA of rank r_i has the first r_i rows of one A that all clients share.

        Raises:
            InputError: a rank is larger than the model's.
        """
        if not self.ranks:
            return dict.fromkeys(fed.clients, fed.initial)
        at = {r: lora.first(fed.initial, r) for r in {*self.ranks}}
        return {c: at[r] for c, r in client_ranks(self.ranks, fed).items()}

    @contextmanager
    def install(self, model: Model, w: Params, rows: Rows) -> Iterator[Rows]:
        if self.ranks:
            with lora.apply(model, w):
                yield rows
        else:
            with self.local.apply(model, w, rows) as judged:
                yield judged

    def params_for(self, s: BipState, client: ClientId) -> Params:
        return s.theta[client]  # line 21

    def start_models(self, s: BipState) -> dict[ClientId, Params]:
        return s.theta_bar | (Vectors(s.theta) - s.tau)

    def details(self, s: BipState, judge: Judge | None) -> dict[str, Any]:
        return {"cut": s.cut} if self.space == "product" else {}

    def arrays(self, s: BipState) -> dict[str, np.ndarray]:
        return {"weights": s.p["p"].numpy(), "layers": np.array(s.layers)}

    def newcomer(
        self, model: Model, s: BipState, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """The newcomer's model and the weight of each client in it, by equation 4.

        The equation takes the newcomer's task vector, and the sum of each other client's task vectors over all rounds.
        Task vectors of a single round would give useless similarities.
        """
        theta = adapt(w_0)
        begun = {k: lora.first(w_0, lora.rank_of(bar)) if self.ranks else w_0 for k, bar in s.theta_bar.items()}
        sigma = Vectors(s.theta_bar) - begun
        x = [Change(theta - w_0, theta), *map(Change, sigma.values(), (s.theta_bar[k] for k in sigma))]
        space = self.space_of(model)
        G = self.gram(space, x)
        g, counts = similarities(G, self.similarity)
        p = shares(g, counts, self.negative, self.temperature)[:, :1]
        if not np.isfinite(p).all():
            raise InputError(
                f'join: the similarities of {client} have a sum of less than {LEAST}, and negative = "raw" divides by '
                f"it"
            )
        (theta_bar,), _ = space.aggregates(p * self.factors(space, x, G), x, [w_0], self.aggregate == "parameters")
        return theta_bar, dict(zip([client, *sigma], p.mean((0, 1)).tolist(), strict=True))

    def baselines(self) -> dict[str, Method[Any]]:
        """Local training of each client alone, and one model for all clients."""
        plan: dict[str, Any] = {"rounds": self.rounds, "fraction": self.fraction, "local": self.local}
        return {"alone": LocalOnly(**plan), "one-for-all": FedAvg(**plan)}

    def validate(self) -> None:
        if self.ranks and self.space != "product":
            raise InputError(
                f'method.ranks = {list(self.ranks)}: they need method.space = "product"', key="method.ranks"
            )
        if self.ranks and self.local.personal:
            raise InputError(
                "method.ranks: a client optimiser that keeps a model at the client needs one rank for all clients",
                key="method.ranks",
            )


def similarities(G: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Similarities g of equation 4 (L, K, K), and a mask of those that count. A zero vector counts only for itself."""
    square, same = np.einsum("lkk->lk", G), np.eye(G.shape[1], dtype=bool)
    counts = (square[:, :, None] > 0) & (square[:, None] > 0) | same
    if kind == "l2":
        d = np.sqrt(np.maximum(square[:, :, None] + square[:, None] - 2 * G, 0))
        m = np.median(d[:, ~same], 1)[:, None, None] if G.shape[1] > 1 else np.ones((len(G), 1, 1))
        return 1 / (1 + d / np.where(m > 0, m, 1)), counts
    norm = np.sqrt(np.where(square > 0, square, 1))
    return np.where(same, 1, np.clip(G / (norm[:, :, None] * norm[:, None]), -1, 1)), counts


def shares(g: np.ndarray, counts: np.ndarray, negative: str, temperature: float = 1.0) -> np.ndarray:
    """Weights p of equation 4 (L, K, K) over the entries that count; a row is NaN if the sum of its similarities is
    too small.
    """
    if negative == "softmax":
        g = np.exp((g - 1) / temperature)
    elif negative == "clip":
        g = np.maximum(g, 0)
    g = g * counts
    total = g.sum(2, keepdims=True)  # with clip and softmax at least 1, from g_ii or an equal vector
    return np.asarray(np.divide(g, total, out=np.full_like(g, np.nan), where=total >= LEAST))


def spread(p: np.ndarray, clients: Sequence[ClientId], rows: Sequence[ClientId], columns: Sequence[ClientId]) -> Params:
    """Weights p (L, K, K) of all clients, from the weights of these rows and columns; all other entries are zero."""
    at, of = ([clients.index(k) for k in some] for some in (rows, columns))
    shown = np.zeros((len(p), len(clients), len(clients)), dtype=np.float32)
    shown[np.ix_(range(len(p)), at, of)] = p
    return Params({"p": torch.from_numpy(shown)})


def copies(tau: Mapping[ClientId, Params]) -> Iterator[tuple[ClientId, ClientId]]:
    """(client, first client with the same vector), for each client whose vector repeats an earlier one bit for bit.

    Zero vectors are left out.
    """
    first: dict[bytes, ClientId] = {}
    for client, x in tau.items():
        digest = hashlib.sha256()
        for flat in x.flats.values():
            digest.update(to_bytes(flat))
        of = first.setdefault(digest.digest(), client)
        if of != client and x.norm():
            yield client, of


def cap_factors(squares: np.ndarray, cap: float) -> np.ndarray:
    """Factors (K,) that shorten vectors, given their squared norms, to at most ``cap`` times the median norm."""
    norms = np.sqrt(squares)
    return np.asarray(np.minimum(1, cap * np.median(norms) / np.where(norms > 0, norms, 1)))
