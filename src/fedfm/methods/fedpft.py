"""FedPFT: Parametric Feature Transfer, One-shot Federated Learning with Foundation Models.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang. 2024. arXiv:2402.01862, Algorithm 1; equations by their numbers
there. Clients send Gaussian mixtures of the features f(x) of each class, once; the server trains a head h on samples
from them, and w = h o f. Section 4.2, decentralised, shares its two steps (``_topology`` carries the messages); what is
sent under differential privacy instead of mixtures stands in ``_fedpft_private``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.errors import E_FIELD, ClientFault, InputError, RunError
from fedfm.federation import Client, ClientId, Federation, Update, on_client
from fedfm.method import Judge, Method
from fedfm.methods import _fedpft_private as private
from fedfm.methods._fedpft_account import bounded, communication, divergences
from fedfm.methods._fedpft_private import Noised
from fedfm.methods._fedpft_settings import plan_of, refuse
from fedfm.methods._one_shot import head_of, need_head, rows_of
from fedfm.methods._topology import Handed, Passed, carry, parents_of
from fedfm.mixtures import Mixture, capacity, fit_without_singles
from fedfm.mixtures.summary import MOST, Summary, Synthetic, checker, opened
from fedfm.mixtures.transport import nothing, pack, unpack
from fedfm.params import Params
from fedfm.privacy.moments import Plan
from fedfm.rows import Rows
from fedfm.training import softmax
from fedfm.training.softmax import HeadSpec

__all__ = ["FedPFT", "Handed", "Noised", "Passed", "State", "Summary"]

KEEP = 1 << 26  # synthetic numbers that the server holds; beyond it they are drawn again at every pass


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
    components: int = field(
        default=10, metadata={"help": "K at most; a class carries one per ten examples, none of a single one"}
    )
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
        """Lines 2 to 7: g^{i,c} by EM on F^{i,c}, for each class c."""
        x, y = (t.numpy() for t in rows_of(client))
        return self._summary(client, x, y, np.ones(len(y), dtype=bool))

    def _summary(self, client: Client, x: np.ndarray, y: np.ndarray, own: np.ndarray) -> Summary:
        """The mixtures of all classes with at least ``min_count`` rows; ``own`` are the client's, the others drawn."""
        counts = {int(c): int(n) for c, n in zip(*np.unique(y, return_counts=True), strict=True)}
        labels = [c for c, n in counts.items() if n >= self.min_count]
        device = client.model.device
        fits = fit_without_singles(
            [x[y == c] for c in labels],
            [capacity(counts[c], self._most(client)) for c in labels],
            self.covariance,
            seeds=[seeds.derive(client.seed, "em", c) for c in labels],
            device=device if device.type == "cuda" else None,
        )
        withheld = [int(c) for c in np.unique(y[own]) if c not in labels]
        mixtures = [f.mixture for f in fits]
        packed = pack(mixtures, self.transport) if fits else nothing(self.covariance, x.shape[1], self.transport)
        sent = dict(zip(labels, unpack(packed), strict=True))
        apart = divergences(client, x[own], y[own], sent, self.smoothing) if self.bound else []
        sizes = [counts[c] if self.counts == "exact" else self.samples for c in labels]
        return Summary(labels, sizes, packed, withheld, [d.kl for d in apart], [d.tv for d in apart])

    @on_client
    def pass_on(self, client: Client, received: list[Handed]) -> Passed:
        """Section 4.2: EM on F^{i,c} and the samples of what was received; a head on the same rows."""
        return self._passed(client, received, *(t.numpy() for t in rows_of(client)))

    @on_client
    def pass_noisy(self, client: Client, received: list[Handed]) -> Passed:
        """The same on draws from the client's noisy release instead of its rows: all that follows costs nothing."""
        return self._passed(client, received, *private.drawn(client, self._plan))

    def _passed(self, client: Client, received: list[Handed], x: np.ndarray, y: np.ndarray) -> Passed:
        drawn = Synthetic(opened([h.summary for h in received]), self.samples, client.seed)
        blocks = [(x, y), *((a.numpy(), b.numpy()) for a, b in drawn())]
        everything, labels = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        own = np.arange(len(labels)) < len(y)
        summary = self._summary(client, everything, labels, own)
        if not len(labels):  # nothing stands out of the noise, and nobody went before
            return Passed(summary, head_of(client.model, *private.no_head(*_shape(client.model))))
        w, b = softmax.fit_rows(
            torch.from_numpy(everything), torch.from_numpy(labels), len(client.model.classes), self.head, client.seed
        )
        return Passed(summary, head_of(client.model, w, b))

    @on_client
    def release(self, client: Client) -> Noised:
        """Theorem 4.1 as it holds: noisy sums of every class, from a key that never leaves the client."""
        return private.noisy_sums(client, self._plan)

    @on_client
    def release_mixtures(self, client: Client) -> Summary:
        """Private EM, K > 1. One component does better."""
        return private.noisy_mixtures(client, self._plan, self._most(client), self.iterations)

    @on_client
    def sums(self, client: Client) -> Update:
        """Exact sums of every class, for a mean: the noise is added once, to the sum over the federation."""
        return private.exact_sums(client, self._plan)

    @on_client
    def count_errors(self, client: Client, w: Params) -> dict[str, int]:
        """Of the head on the client's own training rows: what a bound can only bound."""
        rows = client.data.train
        assert rows.labels is not None  # noqa: S101 - a classification task has labels
        wrong = self.logits(client.model, w, rows).argmax(1).ne(rows.labels)
        return {"errors": int(wrong.sum()), "rows": len(rows)}

    # --- server half --------------------------------------------------------------------------------------------------

    def init(self, fed: Federation) -> State:
        need_head(fed.model)
        if strangers := sorted(set(self.budgets) - set(fed.clients)):
            raise InputError(f'method.budgets: "{strangers[0]}" is none of the clients {", ".join(fed.clients)}')
        return State(fed.initial, {}, {})

    def step(self, fed: Federation, state: State, t: int) -> State:
        if self.topology != "star":
            state = self._decentralised(fed)
        elif self.privacy is not None and self.components == 1:
            ask, handler = (private.pooled, self.sums) if self.pooled else (private.asked, self.release)
            received, told = ask(fed, handler, self.privacy)
            state = State(self._head(fed, received), {}, told)
        else:
            state = self._star(fed, self.summarise if self.privacy is None else self.release_mixtures)
            if self.privacy is not None:
                told = private.told_of_mixtures(self.privacy, self.components, self.iterations)
                state.told["warnings"] += told.pop("warnings")
                state.told.update(told)
        if self.verify:
            counts = fed.ask(self.count_errors, check=_counted, w=state.w)
            rows = sum(c["rows"] for c in counts.values())
            state.told["verified_error"] = sum(c["errors"] for c in counts.values()) / max(rows, 1)
        return state

    def _star(self, fed: Federation, handler: Any) -> State:
        """Line 8: the server receives every g^{i,c}; then the head."""
        replies = fed.ask(handler, check=checker(*_shape(fed.model), self.bound))
        received = {c: opened([s]) for c, s in replies.items()}
        told = self._told(fed, replies)
        if self.shuffle:
            received = {"": _shuffled(received, seeds.generator(fed.seed_for("shuffle")))}
            told |= {"components_used": {}, "withheld": {}}
        w = self._head(fed, received)
        if self.bound:
            told["bound"] = bounded(
                fed, lambda rows: self.logits(fed.model, w, rows), replies, received, self.min_count
            )
        return State(w, {}, told)

    def _head(self, fed: Federation, received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]]) -> Params:
        """Lines 9 to 13: D~ = union of |F^{i,c}| draws from g^{i,c} with label c; h by cross-entropy on it."""
        drawn = [Synthetic(found, self.samples, fed.seed_for("draw", c)) for c, found in sorted(received.items())]
        size = sum(d.numbers for d in drawn)
        if not size:
            raise RunError(
                "no client sent a mixture, every class is too small: lower method.min_count"
                if self.privacy is None
                else "no class stands out of the noise: give a larger target_epsilon, or pooled = true"
            )
        kept = [list(d()) for d in drawn] if size <= KEEP else None
        sources: Sequence[Any] = [lambda blocks=blocks: blocks for blocks in kept] if kept is not None else drawn
        blocks = lambda: itertools.chain.from_iterable(source() for source in sources)  # noqa: E731
        w, b = softmax.fit(blocks, *_shape(fed.model), self.head, fed.seed_for("head"))
        return head_of(fed.model, w, b)

    def _decentralised(self, fed: Federation) -> State:
        """Section 4.2: the server only carries messages; the head of whom most clients' rows have reached is kept."""
        parents = parents_of(self.topology, self.edges, fed.clients)
        handler = self.pass_on if self.privacy is None else self.pass_noisy
        sent, heads, dropped = carry(fed, handler, parents, checker(*_shape(fed.model)))
        last = max(sent, key=lambda c: (len(sent[c].origins), list(sent).index(c)))
        told = self._told(fed, {c: h.summary for c, h in sent.items()}) | {"order": list(heads), "dropped": dropped}
        if self.privacy is not None:
            told |= private.told_of_sums(self.privacy)
        return State(heads[last], heads, told)

    def _told(self, fed: Federation, replies: Mapping[ClientId, Summary]) -> dict[str, Any]:
        narrow = self.privacy is None or self.topology != "star"
        width = 2 if self.transport == "float16" and narrow else 4
        counted = self.counts == "exact"
        return communication(replies, fed.model.head.in_features, width, self.topology == "star", counted)

    def params_for(self, state: State, client: ClientId) -> Params:
        return state.w

    def logits(self, model: Any, w: Params, rows: Rows) -> Tensor:
        if self.privacy is not None:  # the head was trained on unit features, and is used on them
            model.load(w)
            rows = Rows({"features": private.as_trained(model.features(rows))})
        return super().logits(model, w, rows)

    @property
    def head_takes(self) -> str | None:
        return None if self.privacy is None else "features divided by their Euclidean norm"

    def details(self, state: State, judge: Judge | None) -> dict[str, Any]:
        found = dict(state.told)
        if state.heads and judge is not None:
            found["chain_accuracy"] = [judge(w)["accuracy"] for w in state.heads.values()]
        return found

    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """With one noise for the federation: exact sums, for a mean."""
        return ("sums",) if self.pooled and self.privacy is not None else ()

    @property
    def secrets(self) -> tuple[str, ...]:  # type: ignore[override]
        """With one noise for the federation: its key."""
        return ("noise",) if self.means else ()

    @property
    def asks(self) -> tuple[str, ...]:  # type: ignore[override]
        """What each client's mixtures travel by; with ``verify`` a second message."""
        if self.means:
            return ()
        if self.privacy is not None and self.topology != "star":
            return ("pass_noisy",)
        if self.privacy is not None:
            return ("release" if self.components == 1 else "release_mixtures",)
        sent = "summarise" if self.topology == "star" else "pass_on"
        return (sent, "count_errors") if self.verify else (sent,)

    # --- settings -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        refuse(self)

    def protected(self, privacy: Any) -> FedPFT:
        method = copy.copy(self)
        object.__setattr__(method, "privacy", plan_of(self, privacy))
        return method

    def spent(self) -> list[dict[str, Any]]:
        if self.privacy is None or not self.rounds:
            return []
        released = self.components if self.topology == "star" else 1
        return private.ledger(self.privacy, released, self.iterations, self.pooled)

    @property
    def _plan(self) -> Plan:
        assert self.privacy is not None  # noqa: S101 - a release is asked for only where there is a plan
        return self.privacy

    def _most(self, client: Client) -> int:
        """K of this client, at most."""
        return self.budgets.get(client.id, self.components)


def _shuffled(
    received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]], rng: np.random.Generator
) -> list[tuple[int, int, Mixture]]:
    """All mixtures in random order, without their senders: what a relay between clients and server would pass on.

    It hides which client has which classes. It hides no row: a mixture says as much about its rows as before, and two
    mixtures of one client may be linked by what the client's rows have in common.
    """
    everything = [mixture for found in received.values() for mixture in found]
    return [everything[i] for i in rng.permutation(len(everything))]


def _counted(reply: dict[str, int]) -> None:
    """Refuse what counts no errors among rows."""
    if reply.keys() != {"errors", "rows"} or not 0 <= reply["errors"] <= reply["rows"] <= MOST:
        raise ClientFault(E_FIELD, "errors that do not go with the rows")


def _shape(model: Any) -> tuple[int, int]:
    """(classes, features)."""
    return len(model.classes), model.head.in_features
