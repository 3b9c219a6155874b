"""FedPFT: Parametric Feature Transfer, One-shot Federated Learning with Foundation Models.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang. 2024. arXiv:2402.01862, Algorithm 1; equations by their numbers
there. Clients send Gaussian mixtures of the features f(x) of each class, once; the server trains a head h on samples
from them, and w = h o f.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.errors import E_SHAPE, ClientFault, InputError, RunError
from fedfm.federation import Client, ClientId, Federation, Update, each, on_client
from fedfm.method import Judge, Method
from fedfm.methods._one_shot import head_of, need_head, rows_of
from fedfm.methods._topology import topological
from fedfm.mixtures import Mixture, capacity, fit
from fedfm.mixtures.bound import Divergence, bound, divergence
from fedfm.mixtures.summary import MOST, Summary, Synthetic, checker, from_variances, gaussian, opened
from fedfm.mixtures.transport import formula_numbers, pack, unpack
from fedfm.params import Params, layout_of
from fedfm.privacy.em import plan_for, release_mixture
from fedfm.privacy.gaussian import paper_sigma
from fedfm.privacy.moments import Cell, Plan, release, to_gaussian, too_noisy, unit_rows
from fedfm.privacy.sums import client_sums, federation_sum, width
from fedfm.rows import Rows
from fedfm.training import softmax
from fedfm.training.softmax import HeadSpec

COVARIANCES, TOPOLOGIES = ("spherical", "diag", "full"), ("star", "chain", "ring", "dag")
KEEP = 1 << 26  # synthetic numbers that the server holds; beyond it they are drawn again at every pass


@dataclass(frozen=True)
class Handed:
    """What travels along a chain: a summary, and whose rows are in it."""

    origins: list[str]
    summary: Summary


@dataclass(frozen=True)
class Passed:
    """A client's answer in a decentralised run: the refit for its successors, and its own head."""

    summary: Summary
    head: Params


@dataclass(frozen=True)
class Noised:
    """What a client sends under differential privacy: noisy sums of every class, also of those that it has not.

    Attributes:
        counts: (C,) noisy.
        totals: (C, d) noisy sums of unit features.
        seconds: (C, s) noisy second moments: none (spherical), the squares (diag) or the lower triangle (full).
        rows: of the client, where the paper's other reading of n needs it; else 0.
    """

    counts: Tensor
    totals: Tensor
    seconds: Tensor
    rows: int


@dataclass(frozen=True)
class State:
    """Server state: the head, the heads along the way (decentralised), and what the result line tells."""

    w: Params
    heads: dict[str, Params]
    told: dict[str, Any]


@dataclass(frozen=True)
class FedPFT(Method[State]):
    """One round: mixtures up, a head down."""

    adaptation: ClassVar[str] = "head"
    adaptations: ClassVar[tuple[str, ...]] = ("head",)
    state_type: ClassVar[Any] = State
    privacy: ClassVar[Plan | None] = None  # of an instance: see protected()

    rounds: int = field(default=1, metadata={"help": "1; 0 evaluates the start"})
    covariance: str = field(default="diag", metadata={"help": "of a component: spherical, diag or full"})
    components: int = field(default=10, metadata={"help": "K at most; a class carries one per ten examples"})
    budgets: dict[str, int] = field(default_factory=dict, metadata={"help": "K of single clients by name"})
    transport: str = field(default="float16", metadata={"help": "of the numbers sent: float16 or float32"})
    topology: str = field(default="star", metadata={"help": "star (one server), or chain, ring, dag: decentralised"})
    edges: tuple[tuple[str, ...], ...] = field(default=(), metadata={"help": 'of a dag: [["a", "b"], ["b", "c"]]'})
    min_count: int = field(default=5, metadata={"help": "a class with fewer examples is withheld"})
    samples: int = field(default=0, metadata={"help": "drawn per mixture; 0: as many as the class has examples"})
    shuffle: bool = field(default=False, metadata={"help": "forget who sent which mixture (Appendix A.3)"})
    counts: str = field(default="exact", metadata={"help": "of classes: exact, or withheld (give samples)"})
    calibration: str = field(default="analytic", metadata={"help": "of private noise: analytic; paper, paper_client"})
    relation: str = field(default="add_remove", metadata={"help": "neighbours: add_remove, replace, replace_any"})
    bound: bool = field(
        default=False, metadata={"help": "clients also send what Theorem 4.2 needs (the report shows it)"}
    )
    smoothing: float = field(default=0.1, metadata={"help": "of features in the bound, times their standard deviation"})
    iterations: int = field(default=5, metadata={"help": "of private EM, where components > 1 (not recommended)"})
    pooled: bool = field(default=False, metadata={"help": "private: one noisy sum over the federation, by a mean"})
    verify: bool = field(default=False, metadata={"help": "clients count the head's errors in a second message"})
    head: HeadSpec = field(default=HeadSpec(), metadata={"help": "how heads are trained"})

    # --- client half --------------------------------------------------------------------------------------------------

    @on_client
    def summarise(self, client: Client) -> Summary:
        """EM on F^{i,c} for each class c."""
        x, y = _rows(client)
        return self._summary(client, x, y, np.ones(len(y), dtype=bool))

    @on_client
    def release(self, client: Client) -> Noised:
        """Theorem 4.1 as it holds: noisy sums of every class, from a key that never leaves the client."""
        x, y = _rows(client)
        x, key, plan = unit_rows(x), client.secret("noise"), self._plan
        classes, dim = len(client.model.classes), x.shape[1]
        counts, totals = torch.zeros(classes), torch.zeros(classes, dim)
        seconds = torch.zeros(classes, plan.seconds(dim))
        for c in range(classes):
            of_class = x[y == c]
            if plan.counts_public and not len(of_class):
                continue  # under this relation everybody may know it
            cell = release(of_class, plan, key, f"{client.id}/moments/{c}", client_rows=len(y))
            counts[c], totals[c] = cell.count, torch.from_numpy(cell.total)
            if cell.second is not None:
                seconds[c] = torch.from_numpy(cell.second)
        return Noised(counts, totals, seconds, len(y) if plan.calibration == "paper_client" else 0)

    @on_client
    def release_mixtures(self, client: Client) -> Summary:
        """Private EM, K > 1: every iteration of every class is noisy, and paid for. One component does better."""
        x, y = _rows(client)
        x, key, plan = unit_rows(x), client.secret("noise"), self._plan
        found = {
            c: release_mixture(
                x[y == c],
                plan,
                key,
                f"{client.id}/em/{c}",
                components=self.budgets.get(client.id, self.components),
                iterations=self.iterations,
            )
            for c in range(len(client.model.classes))
            if not plan.counts_public or (y == c).any()
        }
        sent = {c: m for c, m in found.items() if m is not None}
        mixtures = [from_variances(m.weights, m.means, m.variances) for m in sent.values()]
        counts = [min(max(round(m.count), 1), MOST) for m in sent.values()]
        return Summary(list(sent), counts, pack(mixtures, "float32"), [])

    @on_client
    def sums(self, client: Client) -> Update:
        """Exact sums of every class, for a mean: the noise is added once, to the sum over the federation."""
        x, y = _rows(client)
        found = client_sums(unit_rows(x), y, len(client.model.classes), self._plan)
        return Update(Params({"sums": torch.from_numpy(found)}), 1.0)

    @on_client
    def pass_on(self, client: Client, received: list[Handed]) -> Passed:
        """Section 4.2: EM on F^{i,c} and the samples of what was received; a head on the same rows."""
        x, y = _rows(client)
        drawn = Synthetic(opened([h.summary for h in received]), self.samples, client.seed)
        blocks = [(x, y), *((a.numpy(), b.numpy()) for a, b in drawn())]
        everything, labels = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        own = np.arange(len(labels)) < len(y)
        summary = self._summary(client, everything, labels, own)
        w, b = softmax.fit_rows(
            torch.from_numpy(everything), torch.from_numpy(labels), len(client.model.classes), self.head, client.seed
        )
        return Passed(summary, head_of(client.model, w, b))

    @on_client
    def count_errors(self, client: Client, w: Params) -> dict[str, int]:
        """Of the head on the client's own training rows: what a bound can only bound."""
        rows = client.data.train
        assert rows.labels is not None  # noqa: S101 - a classification task has labels
        wrong = self.logits(client.model, w, rows).argmax(1).ne(rows.labels)
        return {"errors": int(wrong.sum()), "rows": len(rows)}

    def _summary(self, client: Client, x: np.ndarray, y: np.ndarray, own: np.ndarray) -> Summary:
        """The mixtures of all classes with at least ``min_count`` rows."""
        most = self.budgets.get(client.id, self.components)
        counts = {int(c): int(n) for c, n in zip(*np.unique(y, return_counts=True), strict=True)}
        labels = [c for c, n in counts.items() if n >= self.min_count]
        fits = fit(
            [x[y == c] for c in labels],
            [capacity(counts[c], most) for c in labels],
            self.covariance,
            seeds=[seeds.derive(client.seed, "em", c) for c in labels],
        )
        withheld = [int(c) for c in np.unique(y[own]) if c not in labels]
        packed = pack([f.mixture for f in fits], self.transport)
        apart = self._divergences(client, x[own], y[own], dict(zip(labels, unpack(packed), strict=True)))
        kl, tv = [d.kl for d in apart], [d.tv for d in apart]
        sizes = [counts[c] if self.counts == "exact" else self.samples for c in labels]
        return Summary(labels, sizes, packed, withheld, kl, tv)

    def _divergences(
        self, client: Client, x: np.ndarray, y: np.ndarray, sent: Mapping[int, Mixture]
    ) -> list[Divergence]:
        """Appendix F: of each class from the mixture as it is sent."""
        if not self.bound:
            return []
        width = self.smoothing * float(x.std(0).mean())
        return [divergence(x[y == c], g, width, seeds.generator(client.seed, "bound", c)) for c, g in sent.items()]

    # --- server half --------------------------------------------------------------------------------------------------

    def init(self, fed: Federation) -> State:
        need_head(fed.model)
        return State(fed.initial, {}, {})

    def step(self, fed: Federation, state: State, t: int) -> State:
        if self.topology != "star":
            state = self._decentralised(fed)
        elif self.privacy is not None and (self.pooled or self.components == 1):
            state = self._private(fed, self.privacy)
        else:
            handler = self.summarise if self.privacy is None else self.release_mixtures
            replies = fed.ask(handler, check=checker(*_shape(fed.model), self.bound))
            received = {c: opened([s]) for c, s in replies.items()}
            told = self._told(fed, replies)
            if self.shuffle:
                received = {"": _shuffled(received, seeds.generator(fed.seed_for("shuffle")))}
                told |= {"components_used": {}, "withheld": {}}
            w = self._head(fed, received)
            if self.bound:
                told["bound"] = self._bound(fed, w, replies, received)
            state = State(w, {}, told)
        if self.verify:
            counts = fed.ask(self.count_errors, w=state.w)
            rows = sum(c["rows"] for c in counts.values())
            state.told["verified_error"] = sum(c["errors"] for c in counts.values()) / max(rows, 1)
        return state

    def _head(self, fed: Federation, received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]]) -> Params:
        """Lines 9 to 13: D~ = union of |F^{i,c}| draws from g^{i,c} with label c; h by cross-entropy on it."""
        drawn = [Synthetic(found, self.samples, fed.seed_for("draw", c)) for c, found in sorted(received.items())]
        size = sum(d.numbers for d in drawn)
        kept = [list(d()) for d in drawn] if size <= KEEP else None
        sources: Sequence[Any] = [lambda blocks=blocks: blocks for blocks in kept] if kept is not None else drawn
        classes, dim = len(fed.model.classes), fed.model.head.in_features
        if not size:
            raise RunError(
                "no client sent a mixture, every class is too small: lower method.min_count"
                if self.privacy is None
                else "no class stands out of the noise: give a larger target_epsilon, or pooled = true"
            )
        blocks = lambda: itertools.chain.from_iterable(source() for source in sources)  # noqa: E731
        w, b = softmax.fit(blocks, classes, dim, self.head, fed.seed_for("head"))
        return head_of(fed.model, w, b)

    def _bound(
        self,
        fed: Federation,
        w: Params,
        replies: Mapping[ClientId, Summary],
        received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]],
    ) -> dict[str, Any]:
        """Theorem 4.2 as it holds and as it is printed, with the head's errors on fresh draws."""
        errors = draws = 0
        for c, found in sorted(received.items()):
            for x, y in Synthetic(found, 0, fed.seed_for("bound", c))():
                errors += int((self.logits(fed.model, w, Rows({"features": x})).argmax(1) != y).sum())
                draws += len(y)
        cells = [[Divergence(*d) for d in zip(s.kl, s.tv, strict=True)] for s in replies.values()]
        return asdict(bound(errors, draws, [s.counts for s in replies.values()], cells))

    def _private(self, fed: Federation, plan: Plan) -> State:
        """Noisy sums to Gaussians, which is post-processing; draws and head as ever."""
        classes, dim = len(fed.model.classes), fed.model.head.in_features
        shapes = [(classes,), (classes, dim), (classes, plan.seconds(dim))]

        def normals(reply: Noised) -> list[tuple[int, int, Mixture]]:
            found = []
            for c in range(classes):
                if plan.counts_public and not reply.counts[c]:
                    continue
                second = reply.seconds[c].double().numpy() if plan.seconds(dim) else None
                cell = Cell(float(reply.counts[c]), reply.totals[c].double().numpy(), second)
                if (normal := to_gaussian(cell, plan, dim, client_rows=reply.rows)) is not None:
                    found.append((c, min(max(round(normal[0]), 1), MOST), gaussian(*normal[1:])))
            return found

        def check(reply: Noised) -> None:
            if [tuple(t.shape) for t in (reply.counts, reply.totals, reply.seconds)] != shapes:
                raise ClientFault(E_SHAPE, "noisy sums of other shapes")
            normals(reply)

        if self.pooled:
            return self._pooled(fed, plan)
        replies = fed.ask(self.release, check=check)
        received = {client: normals(reply) for client, reply in replies.items()}
        typical = max(1, round(sum(n for found in received.values() for _, n, _ in found) / (classes * len(replies))))
        exact = plan.sum_sigma(typical, client_rows=typical)
        told = {
            "formula_bytes": 4 * classes * (1 + dim + plan.seconds(dim)) * len(replies),
            "cells_kept": sum(map(len, received.values())),
            "cells": classes * len(replies),
            "noise_std_of_sums": exact,
            "times_paper_noise": paper_sigma(plan.epsilon, plan.delta, 1) / exact,
            "warnings": [text for text in [too_noisy(plan, dim, typical, client_rows=typical)] if text],
        }
        return State(self._head(fed, received), {}, told)

    def _pooled(self, fed: Federation, plan: Plan) -> State:
        """One noise for all clients' sums together, so 1/m of a client's noise on a mean over m clients."""
        classes, dim = len(fed.model.classes), fed.model.head.in_features
        shape = (classes, width(plan, dim))
        mean = fed.mean(self.sums, like=layout_of((("sums", torch.float64, shape),)))
        cells = federation_sum(mean["sums"].numpy(), fed.heard, plan, dim, fed.secret("noise"), f"sum {fed.round}")
        normals = {c: to_gaussian(cell, plan, dim) for c, cell in cells.items()}
        found = [(c, min(max(round(n[0]), 1), MOST), gaussian(*n[1:])) for c, n in normals.items() if n is not None]
        typical = max(1, round(sum(n for _, n, _ in found) / classes))
        told = {
            "formula_bytes": 8 * classes * shape[1] * fed.heard,
            "cells_kept": len(found),
            "cells": classes,
            "noise_std_of_sums": plan.sum_sigma(typical),
            "warnings": ["the server sees every client's exact sums until a secure aggregation hides them"],
        }
        return State(self._head(fed, {"federation": found}), {}, told)

    @property
    def _plan(self) -> Plan:
        assert self.privacy is not None  # noqa: S101 - a release is asked for only where there is a plan
        return self.privacy

    def _decentralised(self, fed: Federation) -> State:
        """Section 4.2: the server only carries messages, from each client to its successors."""
        parents = self._parents(fed.clients)
        sent: dict[ClientId, Handed] = {}
        heads: dict[str, Params] = {}
        dropped, summaries = [], {}
        for client in topological(parents):
            handed: list[Handed] = []
            for h in sorted((sent[p] for p in parents[client] if p in sent), key=lambda h: -sum(h.summary.counts)):
                if any(set(h.origins) & set(other.origins) for other in handed):
                    dropped.append(f"{client}: what {h.origins[-1]} sent, which counts an origin twice")
                else:
                    handed.append(h)
            payload = each({client: handed})
            replies = fed.ask(self.pass_on, of=[client], check=_passing(fed.model), least=0, received=payload)
            if client not in replies:
                continue  # left out, with a line that says why; its successors do without it
            reply = replies[client]
            origins = [o for h in handed for o in h.origins] + [client]
            sent[client], heads[client], summaries[client] = Handed(origins, reply.summary), reply.head, reply.summary
        if len(sent) < max(fed.min_clients, 1):
            raise RunError(
                f"{len(sent)} of {len(parents)} clients passed something on, min_clients is {fed.min_clients}"
            )
        last = max(sent, key=lambda c: (len(sent[c].origins), list(sent).index(c)))
        told = self._told(fed, summaries) | {"order": list(heads), "dropped": dropped}
        return State(heads[last], heads, told)

    def _parents(self, clients: Sequence[ClientId]) -> dict[ClientId, list[ClientId]]:
        """Who sends to whom; a ring is a chain cut at its start."""
        if self.topology in ("chain", "ring"):
            return {c: list(clients[i - 1 : i]) if i else [] for i, c in enumerate(clients)}
        parents: dict[ClientId, list[ClientId]] = {c: [] for c in clients}
        for edge in self.edges:
            for name in edge:
                if name not in parents:
                    raise InputError(f'method.edges: "{name}" is none of the clients {", ".join(clients)}')
            parents[edge[1]].append(edge[0])
        return parents

    def _told(self, fed: Federation, replies: Mapping[ClientId, Summary]) -> dict[str, Any]:
        """Communication by equations (10) to (12), and what was lowered or withheld."""
        width = 2 if self.transport == "float16" and self.privacy is None else 4
        dim = fed.model.head.in_features
        used = {c: dict(zip(map(str, s.labels), s.mixtures.components, strict=True)) for c, s in replies.items()}
        numbers = sum(
            formula_numbers(s.mixtures.covariance, dim, k) for s in replies.values() for k in s.mixtures.components
        )
        rows = sum(sum(s.counts) for s in replies.values())
        told: dict[str, Any] = {
            "formula_bytes": width * numbers,
            "raw_feature_bytes": width * rows * dim,
            "components_used": used,
            "withheld": {c: s.withheld for c, s in replies.items() if s.withheld},
            "warnings": [],
        }
        if told["raw_feature_bytes"] < told["formula_bytes"] and self.topology == "star":
            told["warnings"].append("the raw features would be smaller than the mixtures: lower method.components")
        return told

    def params_for(self, state: State, client: ClientId) -> Params:
        return state.w

    def logits(self, model: Any, w: Params, rows: Rows) -> Tensor:
        if self.privacy is None:
            return super().logits(model, w, rows)
        model.load(w)  # the head was trained on unit features, and is used on them
        x = torch.from_numpy(unit_rows(model.features(rows).numpy())).float()
        return model.predict(Rows({"features": x}))  # type: ignore[no-any-return]

    def details(self, state: State, judge: Judge | None) -> dict[str, Any]:
        found = dict(state.told)
        if state.heads and judge is not None:
            found["chain_accuracy"] = [judge(w)["accuracy"] for w in state.heads.values()]
        return found

    # --- settings -----------------------------------------------------------------------------------------------------

    def protected(self, privacy: Any) -> FedPFT:
        if privacy.mechanism not in (None, "gaussian"):
            raise InputError(f'privacy.mechanism = "{privacy.mechanism}": fedpft has "gaussian"')
        if privacy.unit != "record":
            raise InputError(f'privacy.unit = "{privacy.unit}": fedpft protects a "record"')
        if self.topology != "star":
            raise InputError(f'method.topology = "{self.topology}": under [privacy] only "star"')
        if self.pooled and self.components != 1:
            raise InputError(f"method.components = {self.components}: one sum over the federation has 1 component")
        if self.components == 1 and self.budgets:
            raise InputError("method.budgets: with method.components = 1 under [privacy] drop it")
        if self.components > 1 and self.calibration != "analytic":
            raise InputError(f'method.calibration = "{self.calibration}": private EM has "analytic"')
        if self.bound or self.verify:
            raise InputError("method.bound and method.verify tell what is not accounted for: drop them under [privacy]")
        plan = Plan(self.relation, self.covariance, privacy.target_epsilon, privacy.delta, self.calibration)
        method = copy.copy(self)
        object.__setattr__(method, "privacy", plan)
        return method

    def spent(self) -> list[dict[str, Any]]:
        if self.privacy is None:
            return []
        if self.privacy.calibration == "paper_client":
            return []  # it promises nothing
        plan = self.privacy if self.components == 1 else plan_for(self.privacy, self.iterations)
        spent = plan.spent()
        if self.pooled:
            spent = replace(spent, note="against who sees the head, not against the server, which adds the noise")
        return [asdict(spent)]

    def averages(self) -> bool:
        return self.pooled

    def validate(self) -> None:
        if self.rounds not in (0, 1):
            raise InputError(f"method.rounds = {self.rounds}: fedpft takes one round, expected 1")
        for key, options in (
            ("covariance", COVARIANCES),
            ("topology", TOPOLOGIES),
            ("transport", ("float16", "float32")),
            ("counts", ("exact", "withheld")),
            ("calibration", ("analytic", "paper", "paper_client")),
            ("relation", ("add_remove", "replace", "replace_any")),
        ):
            if getattr(self, key) not in options:
                raise InputError(f'method.{key} = "{getattr(self, key)}": expected one of {", ".join(options)}')
        for key, value in {
            "components": self.components,
            "min_count": self.min_count,
            "iterations": self.iterations,
            **self.budgets,
        }.items():
            if value < 1:
                raise InputError(f"method.{key} = {value}: expected a whole number of at least 1")
        if self.samples < 0:
            raise InputError(f"method.samples = {self.samples}: expected a whole number of at least 0")
        if self.counts == "withheld" and (not self.samples or self.topology != "star" or self.bound):
            raise InputError('method.samples: counts = "withheld" needs a number to draw, topology "star" and no bound')
        if (self.topology == "dag") != bool(self.edges):
            raise InputError('method.edges goes with topology = "dag", and a dag needs them')
        if self.shuffle and (self.topology != "star" or self.bound):
            raise InputError('method.shuffle: only with topology = "star" and without bound')
        if self.bound and self.topology != "star":
            raise InputError(f'method.bound: only with topology = "star", not "{self.topology}"')
        if not self.smoothing > 0:
            raise InputError(f"method.smoothing = {self.smoothing}: expected a number above 0")
        if any(len(edge) != 2 for edge in self.edges):
            raise InputError('method.edges: expected pairs of names, e.g. [["a", "b"]]')
        names = {name for edge in self.edges for name in edge}
        topological({n: [a for a, b in self.edges if b == n] for n in names})
        self.head.validate()


def _rows(client: Client) -> tuple[np.ndarray, np.ndarray]:
    """(features (n, d), labels (n,)) of the training rows."""
    x, y = rows_of(client)
    return x.numpy(), y.numpy()


def _shuffled(
    received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]], rng: np.random.Generator
) -> list[tuple[int, int, Mixture]]:
    """All mixtures in random order, without their senders: what a relay between clients and server would pass on.

    It hides which client has which classes. It hides no row: a mixture says as much about its rows as before, and two
    mixtures of one client may be linked by what the client's rows have in common.
    """
    everything = [mixture for found in received.values() for mixture in found]
    return [everything[i] for i in rng.permutation(len(everything))]


def _shape(model: Any) -> tuple[int, int]:
    """(classes, features)."""
    return len(model.classes), model.head.in_features


def _passing(model: Any) -> Callable[[Passed], None]:
    check = checker(*_shape(model))

    def both(passed: Passed) -> None:
        check(passed.summary)
        if passed.head.layout is not model.layout:
            raise ClientFault(E_SHAPE, "a head of other shape")

    return both
