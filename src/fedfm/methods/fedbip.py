"""FedBip: Bi-level Personalization for Federated Foundation Models: A Task-vector Aggregation Approach.

Yang, Long, Lu, Zhu, Jiang. 2025. arXiv:2509.12697, Algorithm 1: FedBip, and by layer FedBip-L.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from fedfm.errors import E_DUPLICATE, InputError, RunError, one_of
from fedfm.federation import Client, ClientId, Federation, Update, each, on_client
from fedfm.method import Method
from fedfm.models.layers import GRANULARITIES, layers
from fedfm.pairwise import gram, mix
from fedfm.params import Params, to_bytes
from fedfm.training import SGD, Local

LEAST = 0.1  # a smaller sum of raw similarities is no denominator


@dataclass(frozen=True)
class Personal:
    """Server state, a vector a client each.

    Attributes:
        theta: theta_i, what the client's last local pass ended with.
        theta_bar: theta_bar_i, what its next one starts from.
        tau: its last task vector; of clients that have been asked.
        p: ``p`` (L, K, K), the last round's weights; rows of clients that did not take part are zero.
    """

    theta: dict[ClientId, Params]
    theta_bar: dict[ClientId, Params]
    tau: dict[ClientId, Params]
    p: Params
    layers: tuple[str, ...]


@dataclass(frozen=True)
class FedBip(Method[Personal]):
    """Every client its own aggregate: the sum of all task vectors, weighted by how similar they are to its own."""

    own_models: ClassVar[bool] = True
    asks: ClassVar[tuple[str, ...]] = ("train",)
    state_type: ClassVar[Any] = Personal

    rounds: int = field(default=10, metadata={"help": "T, communication rounds; 0 evaluates the start"})
    fraction: float = field(default=1.0, metadata={"help": "the fraction of clients that a round asks"})
    local: Local = field(default=SGD(), metadata={"help": "client optimiser: E, B, eta"})
    granularity: str = field(
        default="model", metadata={"help": "model: FedBip; layer (a transformer block): FedBip-L; or module"}
    )
    similarity: str = field(default="cosine", metadata={"help": "g: cosine, pearson, or l2: 1/(1 + d/median d)"})
    negative: str = field(
        default="clip",
        metadata={"help": "what g becomes: clip, max(0, g); raw, as printed; softmax, exp(g/temperature)"},
    )
    temperature: float = field(default=0.3, metadata={"help": "of softmax"})
    weights_from: str = field(default="task_vector", metadata={"help": "what g compares: task_vector or parameters"})
    aggregate: str = field(default="task_vector", metadata={"help": "what is summed: task_vector or parameters"})
    space: str = field(default="factors", metadata={"help": "LoRA's A and B: factors, as they are, or product, B A"})
    absent: str = field(
        default="cached", metadata={"help": "of clients that a round does not ask: cached, their last tau, or left out"}
    )
    norm_cap: float | None = field(
        default=None, metadata={"help": "no task vector counts with more than this many times the median norm"}
    )

    def init(self, fed: Federation) -> Personal:
        start = dict.fromkeys(fed.clients, fed.initial)  # theta_pre: the same for all, LoRA's A included
        names, K = layers(fed.model, self.granularity), len(fed.clients)
        return Personal(start, start, {}, Params({"p": torch.zeros(len(names), K, K)}), tuple(names))

    def step(self, fed: Federation, s: Personal, t: int) -> Personal:
        cohort, like = fed.sample(self.fraction), fed.initial.layout
        replies = fed.ask(self.train, of=cohort, like=like, theta_bar=each(s.theta_bar))  # lines 3 to 7
        now = {i: update.delta for i, update in replies.items()}
        theta = s.theta | {i: s.theta_bar[i] + now[i] for i in now}
        tau = s.tau | now
        pool = sorted(tau if self.absent == "cached" else now)  # from whom the clients of this round learn
        p = self.weights(fed, {k: tau[k] for k in pool}, {k: theta[k] for k in pool}, now)  # (L, |pool|, |pool|)
        rows = [pool.index(i) for i in now]
        mixed = self.mixed(fed.model, p[:, rows], list(now), s.theta_bar, pool, theta, tau)  # lines 11, 17
        seen = [fed.clients.index(k) for k in pool]
        shown = np.zeros((len(p), len(fed.clients), len(fed.clients)), dtype=np.float32)
        shown[np.ix_(range(len(p)), [seen[r] for r in rows], seen)] = p[:, rows]
        return Personal(theta, s.theta_bar | mixed, tau, Params({"p": torch.from_numpy(shown)}), s.layers)

    @on_client
    def train(self, client: Client, theta_bar: Params) -> Update:
        theta = self.local(client, theta_bar)  # equation 2
        return Update(theta - theta_bar, 1.0, client.metrics)  # tau_i, equation 3; sums know no n_k

    def weights(
        self, fed: Federation, tau: dict[ClientId, Params], theta: dict[ClientId, Params], now: Container[ClientId]
    ) -> np.ndarray:
        """``p`` of equation 4, by layer equation 6: (L, K, K). Of vectors that are equal bit for bit one counts."""
        names, clients = layers(fed.model, self.granularity), list(tau)
        compared = tau if self.weights_from == "task_vector" else theta
        g, counts = similarities(list(compared.values()), list(names.values()), self.similarity)
        for k, of in copies(tau):
            counts[:, :, clients.index(k)] = False
            if k in now:
                fed.exclude(k, E_DUPLICATE, f"its task vector is that of {of} bit for bit: the sums take it once")
        p = shares(g, counts, self.negative, self.temperature)
        if (bad := np.argwhere(~np.isfinite(p).all(2))).size:
            layer, i = bad[0]
            raise RunError(
                f"round {fed.round}: the similarities of {clients[i]} to all sum to less than {LEAST} in "
                f'{list(names)[layer]}, and method.negative = "raw" divides by that sum: use "clip" or "softmax"'
            )
        return p

    def mixed(
        self,
        model: Any,
        p: np.ndarray,
        to: Sequence[ClientId],
        theta_bar: dict[ClientId, Params],
        pool: Sequence[ClientId],
        theta: dict[ClientId, Params],
        tau: dict[ClientId, Params],
    ) -> dict[ClientId, Params]:
        """theta_bar_i + sum_k p_ik tau_k (of parameters: sum_k p_ik theta_k) for every client ``to``."""
        names = list(layers(model, self.granularity).values())
        if self.aggregate == "parameters":
            found = mix(p, [theta[k] for k in pool], names)
        else:
            vectors = capped([tau[k] for k in pool], self.norm_cap)
            found = mix(p, vectors, names, [theta_bar[i] for i in to])
        if statistics := running(model):  # as means: |p| is a weight of each, and they are no task vectors
            q = np.abs(p).mean(0, keepdims=True)
            means = mix(q / q.sum(2, keepdims=True), [theta[k].only(statistics) for k in pool])
            found = [w.replace(mean) for w, mean in zip(found, means, strict=True)]
        return dict(zip(to, found, strict=True))

    def params_for(self, s: Personal, client: ClientId) -> Params:
        return s.theta[client]  # line 21

    def starts(self, s: Personal) -> dict[ClientId, Params]:
        return {i: s.theta[i] - s.tau[i] if i in s.tau else s.theta_bar[i] for i in s.theta}

    def arrays(self, s: Personal) -> dict[str, np.ndarray]:
        return {"weights": s.p["p"].numpy(), "layers": np.array(s.layers)}

    def newcomer(
        self, model: Any, s: Personal, w_0: Params, client: ClientId, adapt: Callable[[Params], Params]
    ) -> tuple[Params, dict[ClientId, float]]:
        """Equation 4 over its own vector and what every other client has got so far: vectors of one round fail."""
        tau = adapt(w_0) - w_0
        sigma = [bar - w_0 for bar in s.theta_bar.values()]
        names = list(layers(model, self.granularity).values())
        g, counts = similarities([tau, *sigma], names, self.similarity)
        p = shares(g, counts, self.negative, self.temperature)[:, :1]
        theta_bar = mix(p, [tau, *sigma], names, [w_0])[0]
        return theta_bar, dict(zip([client, *s.theta_bar], p.mean((0, 1)).tolist(), strict=True))

    def validate(self) -> None:
        if self.rounds < 0:
            raise InputError(f"method.rounds = {self.rounds}: expected a whole number of at least 0")
        if not 0 < self.fraction <= 1:
            raise InputError(f"method.fraction = {self.fraction}: expected a number in (0, 1]")
        one_of("method.granularity", self.granularity, GRANULARITIES)
        one_of("method.similarity", self.similarity, ("cosine", "pearson", "l2"))
        one_of("method.negative", self.negative, ("clip", "raw", "softmax"))
        one_of("method.weights_from", self.weights_from, ("task_vector", "parameters"))
        one_of("method.aggregate", self.aggregate, ("task_vector", "parameters"))
        one_of("method.space", self.space, ("factors", "product"))
        one_of("method.absent", self.absent, ("cached", "present"))
        if not self.temperature > 0:
            raise InputError(f"method.temperature = {self.temperature}: expected a number above 0")
        if self.norm_cap is not None and self.norm_cap < 1:
            raise InputError(f"method.norm_cap = {self.norm_cap}: expected a number of at least 1, e.g. 3.0")
        self.local.validate("method.local")


def similarities(
    vectors: Sequence[Params], layers: Sequence[Sequence[str]], kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """The g of equation 4 (L, K, K), and which of them count (L, K, K): a zero vector has only itself."""
    G = gram(vectors, layers, centre=kind == "pearson")
    square, same = np.einsum("lkk->lk", G), np.eye(len(vectors), dtype=bool)
    counts = (square[:, :, None] > 0) & (square[:, None] > 0) | same
    if kind == "l2":
        d = np.sqrt(np.maximum(square[:, :, None] + square[:, None] - 2 * G, 0))
        m = np.median(d[:, ~same], 1)[:, None, None] if len(vectors) > 1 else np.ones((len(G), 1, 1))
        return 1 / (1 + d / np.where(m > 0, m, 1)), counts
    norm = np.sqrt(np.where(square > 0, square, 1))
    return np.where(same, 1, np.clip(G / (norm[:, :, None] * norm[:, None]), -1, 1)), counts


def shares(g: np.ndarray, counts: np.ndarray, negative: str, temperature: float = 1.0) -> np.ndarray:
    """Rows of the p of equation 4 (L, K, K), over what counts; NaN where a raw sum is too small to divide by."""
    if negative == "softmax":
        g = np.exp((g - 1) / temperature)
    elif negative == "clip":
        g = np.maximum(g, 0)
    g = g * counts
    total = g.sum(2, keepdims=True)  # of clip and softmax at least 1: g_ii, or that of the vector it is a copy of
    p: np.ndarray = np.divide(g, total, out=np.full_like(g, np.nan), where=total >= LEAST)
    return p


def copies(tau: dict[ClientId, Params]) -> Iterator[tuple[ClientId, ClientId]]:
    """(client, the first client that has the same vector bit for bit); zero vectors are no copies."""
    first: dict[bytes, ClientId] = {}
    for client, x in tau.items():
        digest = hashlib.sha256(b"".join(to_bytes(flat) for flat in x.flats.values())).digest()
        if first.setdefault(digest, client) != client and x.norm():
            yield client, first[digest]


def capped(tau: Sequence[Params], cap: float | None) -> Sequence[Params]:
    """No norm above ``cap`` times the median."""
    if cap is None:
        return tau
    norms = [x.norm() for x in tau]
    most = cap * float(np.median(norms))
    return [x if n <= most else (most / n) * x for x, n in zip(tau, norms, strict=True)]


def running(model: Any) -> tuple[str, ...]:
    """Statistics that travel and are not trained, e.g. batch norm's."""
    trained = model.live()
    return tuple(n for n, dtype, _ in model.layout.entries if n not in trained and dtype.is_floating_point)
