"""FedPFT: Parametric Feature Transfer, One-shot Federated Learning with Foundation Models.

Beitollahi, Bie, Hemati, Brunswic, Li, Chen, Zhang. 2024. arXiv:2402.01862, Algorithm 1. Equation numbers are the
paper's. Clients send Gaussian mixtures of the features f(x) of each class, once. The server trains a head h on samples
from these mixtures. The model is w = h o f. The decentralised variant (Section 4.2) uses the same two steps; the module
``topology`` forwards its messages. Under differential privacy clients send noisy sums instead of mixtures; see
``private``.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from fedfm import seeds
from fedfm.core.capabilities import Judge, Needs, Predictor, Private, Traits
from fedfm.core.client import Client, ClientId, Update, on_client
from fedfm.core.federation import Federation
from fedfm.core.fields import Paper, setting
from fedfm.core.kept_sums import ChecksUpdates
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.errors import RunError
from fedfm.linalg.params import Params
from fedfm.methods._convergence import Missed, tell
from fedfm.methods._one_shot import head_of, need_head, rows_of
from fedfm.methods.fedpft import private, rules
from fedfm.methods.fedpft.account import bound_details, communication, divergences, left_out
from fedfm.methods.fedpft.encoding import DTYPES, nothing, pack, unpack
from fedfm.methods.fedpft.mixtures import COVARIANCES, Mixture, capacity, fit_uncounted, fit_without_singles
from fedfm.methods.fedpft.paper import SETTINGS
from fedfm.methods.fedpft.private import Noised
from fedfm.methods.fedpft.release_plan import CALIBRATIONS, RELATIONS, Plan
from fedfm.methods.fedpft.summary import MOST, Summary, Synthetic, check_errors, checker, mixtures_of, shuffle
from fedfm.methods.fedpft.topology import ForwardedSummary, PeerReply, carry, parents_of
from fedfm.models.head_inputs import UNIT_NORM
from fedfm.models.model import Model
from fedfm.privacy import noise
from fedfm.privacy.accountant import Accountant
from fedfm.privacy.spec import PrivacySpec, need
from fedfm.training import fit_head
from fedfm.training.fit_head import HeadSpec

__all__ = ["FedPFT", "ForwardedSummary", "Noised", "PeerReply", "State", "Summary"]

KEEP = 1 << 26  # largest number of synthetic values to keep in memory; if there are more, every pass draws them again


@dataclass(frozen=True)
class State:
    """Server state: the head, each client's head (decentralised only), and details for the run's result."""

    w: Params
    heads: dict[str, Params]
    details: dict[str, Any]


@dataclass(frozen=True)
class FedPFT(ChecksUpdates, Predictor, Private, Method[State]):
    """One round: clients send mixtures of their features, and the server trains a head on draws from them.

    With ``counts = "withheld"`` a client sends no counts, no list of withheld classes and no scores. Mixtures are
    rounded to grids that do not depend on the count, and a class has ``components`` components or one. A message still
    reveals three things. A class with several components has at least ten rows for each. A class with one component has
    at least ``min_count`` rows, and mostly fewer than ten times ``components``. An absent class has fewer than
    ``min_count``. A comparison reveals more: if clients' rows are alike, the distance of their means reveals most
    counts to within a factor of about two. If features have few distinct values, such as whole numbers, their means
    reveal a small count. Only [privacy] bounds what is revealed.

    ``topology = "ring"`` passes once through all clients and gives the same numbers as ``chain``. The last client
    sends no message to the first: it would contain the first client's own rows, and no row may be counted twice.
    """

    needs: ClassVar[Needs] = Needs("head", ("head",), one_class=True, bias=True)
    paper: ClassVar[Mapping[str, Paper]] = SETTINGS
    privacy: ClassVar[Plan | None] = None  # protect() sets it on an instance

    rounds: int = setting(
        1, "the method takes 1 round; 0 evaluates the initial model", ge=0, le=1, words="1, it takes one round"
    )
    covariance: str | None = setting(
        None,
        "covariance of a component: spherical, diag or full; under [privacy] spherical",
        choices=COVARIANCES,
        metadata={"usual": "diag"},
    )
    components: int | None = setting(
        None,
        "largest number K of components of a class: one per ten examples, none for a single example; under [privacy] 1",
        ge=1,
        metadata={"usual": 10},
    )
    budgets: dict[str, int] = setting(dict, "largest K of individual clients, by name", ge=1)
    transport: str = setting("float16", "type of the numbers sent: float16 or float32", choices=tuple(DTYPES))
    topology: str = setting(
        "star", "star (one server), chain, ring (the same as chain) or dag", choices=("star", "chain", "ring", "dag")
    )
    edges: tuple[tuple[str, ...], ...] = setting((), 'edges of a dag: [["a", "b"], ["b", "c"]]')
    min_count: int = setting(5, "a class with fewer examples is withheld; under [privacy] noise decides", ge=1)
    samples: int = setting(
        0, "number of draws from each mixture; 0 means the class's number of examples", ge=0, le=MOST
    )
    shuffle: bool = setting(False, "remove the senders' names from mixtures (Appendix A.3)")
    counts: str = setting(
        "exact",
        "numbers of examples: exact, or withheld (not sent, can only be estimated; needs samples)",
        choices=("exact", "withheld"),
    )
    calibration: str = setting(
        "analytic", "how private noise is computed: analytic, paper, paper_client", choices=CALIBRATIONS
    )
    relation: str = setting("add_remove", "neighbouring relation: add_remove, replace, replace_any", choices=RELATIONS)
    bound: bool = setting(
        False, "clients also send the divergences for the bound of Theorem 4.2, which the report shows"
    )
    smoothing: float = setting(
        0.1, "smoothing of features in the bound, in units of their standard deviation", gt=0, finite=True
    )
    pooled: bool = setting(False, "under [privacy], noise is added once, to the sum over all clients")
    verify: bool = setting(False, "clients count the head's errors in a second message", metadata={"scores": True})
    head: HeadSpec = setting(HeadSpec(), "how heads are trained")

    # --- client half --------------------------------------------------------------------------------------------------

    @on_client
    def summarise(self, client: Client) -> Summary:
        """Lines 2 to 7: g^{i,c} by EM on F^{i,c}, for each class c."""
        x, y = (t.numpy() for t in rows_of(client))
        return self._summary(client, x, y, np.ones(len(y), dtype=bool))

    def _summary(self, client: Client, x: np.ndarray, y: np.ndarray, own: np.ndarray) -> Summary:
        """Mixtures of all classes with at least ``min_count`` rows. ``own`` marks the client's rows; the other
        rows were drawn from received mixtures.
        """
        counts = {int(c): int(n) for c, n in zip(*np.unique(y, return_counts=True), strict=True)}
        labels = [c for c, n in counts.items() if n >= self.min_count]
        mixtures = self._fit(client, {c: x[y == c] for c in labels})
        packed = pack(mixtures, self.transport) if mixtures else nothing(self.shape, x.shape[1], self.transport)
        if self.counts == "withheld":
            return Summary(labels, [self.samples] * len(labels), packed, [])
        sent = dict(zip(labels, unpack(packed), strict=True))
        apart = divergences(client, x[own], y[own], sent, self.smoothing) if self.bound else []
        away = y[own & ~np.isin(y, labels)]
        withheld = [int(c) for c in np.unique(away)]
        sizes = [counts[c] for c in labels]
        return Summary(labels, sizes, packed, withheld, len(away), [d.kl for d in apart], [d.tv for d in apart])

    def _fit(self, client: Client, groups: Mapping[int, np.ndarray]) -> list[Mixture]:
        own = [seeds.derive(client.seed, "em", c) for c in groups]
        rows, most = list(groups.values()), self._most(client)
        if self.counts == "withheld":
            return fit_uncounted(rows, most, self.shape, seeds=own)
        fits = fit_without_singles(rows, [capacity(len(x), most) for x in rows], self.shape, seeds=own)
        return [f.mixture for f in fits]

    @on_client
    def pass_on(self, client: Client, received: list[ForwardedSummary]) -> PeerReply:
        """Section 4.2: EM on F^{i,c} and on samples from the received mixtures; also train a head on the same rows."""
        return self._hand_on(client, received, *(t.numpy() for t in rows_of(client)))

    @on_client
    def pass_noisy(self, client: Client, received: list[ForwardedSummary]) -> PeerReply:
        """As :meth:`pass_on`, with draws from the client's noisy release instead of its rows (post-processing)."""
        return self._hand_on(client, received, *private.draw_rows(client, self._plan))

    def _hand_on(self, client: Client, received: list[ForwardedSummary], x: np.ndarray, y: np.ndarray) -> PeerReply:
        drawn = Synthetic(mixtures_of([h.summary for h in received]), self.samples, client.seed)
        blocks = [(x, y), *((a.numpy(), b.numpy()) for a, b in drawn())]
        everything, labels = (np.concatenate([block[i] for block in blocks]) for i in (0, 1))
        own = np.arange(len(labels)) < len(y)
        summary = self._summary(client, everything, labels, own)
        (classes, dim), missed = _shape(client.model), Missed()
        w, b = torch.zeros(classes, dim), torch.zeros(classes)  # the head if no class exceeds the noise
        if len(labels):
            rows = torch.from_numpy(everything), torch.from_numpy(labels)
            w, b = fit_head.fit_rows(*rows, classes, self.head, client.seed, missed)
        return PeerReply(summary, head_of(client.model, w, b), missed.metrics)

    @on_client
    def release(self, client: Client) -> Noised:
        """Theorem 4.1, corrected: noisy sums of every class; the key of the noise never leaves the client."""
        return private.noisy_sums(client, self._plan)

    @on_client
    def sums(self, client: Client) -> Update:
        """Exact sums of every class, for a mean. The server adds noise once, to the sum over the federation."""
        return private.exact_sums(client, self._plan)

    def check_update(self, handler: str, client: ClientId, update: Update, fed: Federation) -> None:
        private.check_sums(update, fed.model.feature_dim)

    @on_client
    def count_errors(self, client: Client, w: Params) -> dict[str, int]:
        """Errors of the head on the client's own training rows."""
        rows = client.data.train
        assert rows.labels is not None  # noqa: S101 - a classification task has labels
        wrong = self.logits(client.model, w, rows).argmax(1).ne(rows.labels)
        return {"errors": int(wrong.sum()), "rows": len(rows)}

    # --- server half --------------------------------------------------------------------------------------------------

    def init(self, fed: Federation) -> State:
        need_head(fed.model)
        rules.check_budgets(self.budgets, fed.clients)
        return State(fed.initial, {}, {})

    def step(self, fed: Federation, state: State, t: int) -> State:
        if self.topology != "star":
            state = self._pass_along(fed)
        elif self.privacy is not None:
            ask, handler = (private.pool_sums, self.sums) if self.pooled else (private.ask_sums, self.release)
            received, details = ask(fed, handler, self.privacy)
            state = State(self._head(fed, received), {}, details)
        else:
            state = self._star(fed)
        if self.verify:
            counts = fed.ask(self.count_errors, check=check_errors, w=state.w)
            rows = sum(c["rows"] for c in counts.values())
            state.details["verified_error"] = sum(c["errors"] for c in counts.values()) / max(rows, 1)
        return state

    def _star(self, fed: Federation) -> State:
        """Line 8: the server receives every g^{i,c}; then it trains the head."""
        replies = fed.ask(self.summarise, check=checker(*_shape(fed.model), self.bound))
        received = {c: mixtures_of([s]) for c, s in replies.items()}
        details = self._details_of(fed, replies)
        if self.shuffle:
            received = {"": shuffle(received, seeds.generator(fed.seed_for("shuffle")))}
            details |= {"components_used": {}, "withheld": {}}
        w = self._head(fed, received)
        if self.bound:
            details["bound"] = bound_details(
                fed, lambda rows: self.logits(fed.model, w, rows), replies, received, self.min_count
            )
        return State(w, {}, details)

    def _head(self, fed: Federation, received: Mapping[ClientId, Sequence[tuple[int, int, Mixture]]]) -> Params:
        """Lines 9 to 13: D~ = union of |F^{i,c}| draws from g^{i,c} with label c; the head h is trained on D~."""
        drawn = [Synthetic(found, self.samples, fed.seed_for("draw", c)) for c, found in sorted(received.items())]

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            return itertools.chain.from_iterable(d() for d in drawn)

        size = sum(d.numbers for d in drawn)
        if not size:
            raise RunError(
                "no client sent a mixture, because every class has too few rows: lower method.min_count"
                if self.privacy is None
                else "no class exceeds the noise: set a larger target_epsilon"
                + (", or pooled = true" if self.could_pool else "")
            )
        kept, missed = list(blocks()) if size <= KEEP else [], Missed()
        w, b = fit_head.fit(lambda: kept or blocks(), *_shape(fed.model), self.head, fed.seed_for("head"), missed)
        tell(fed, "server", missed.metrics)
        return head_of(fed.model, w, b)

    def _pass_along(self, fed: Federation) -> State:
        """Section 4.2: the server only forwards messages. It keeps the head whose training involved the most
        clients.
        """
        parents = parents_of(self.topology, self.edges, fed.clients)
        handler = self.pass_on if self.privacy is None else self.pass_noisy
        sent, heads, dropped = carry(fed, handler, parents, checker(*_shape(fed.model)))
        last = max(sent, key=lambda c: (len(sent[c].origins), list(sent).index(c)))
        details = self._details_of(fed, {c: h.summary for c, h in sent.items()}) | {
            "order": list(heads),
            "dropped": dropped,
        }
        if self.privacy is not None:
            details |= private.details_of_sums(self.privacy)
        return State(heads[last], heads, details)

    def _details_of(self, fed: Federation, replies: Mapping[ClientId, Summary]) -> dict[str, Any]:
        width = 2 if self.transport == "float16" else 4
        counted = self.counts == "exact"
        details = communication(replies, fed.model.feature_dim, width, self.topology == "star", counted)
        if counted:
            details["withheld_classes"] = sum(len(s.withheld) for s in replies.values())
            details["withheld_rows"] = sum(s.withheld_rows for s in replies.values())
        return details

    def params_for(self, state: State, client: ClientId) -> Params:
        return state.w

    def logits(self, model: Model, w: Params, rows: Rows) -> Tensor:
        model.load(w)
        if self.privacy is not None:  # the head was trained on features of norm 1
            unit = noise.unit_rows(model.features(rows).numpy())
            rows = Rows({"features": torch.from_numpy(unit).float()})
        said: Tensor = model.predict(rows)
        return said

    @property
    def feature_transform(self) -> str | None:
        return None if self.privacy is None else UNIT_NORM

    def forewarnings(self, counts: Mapping[ClientId, Sequence[int]]) -> list[str]:
        # Only a star gets this warning: in a chain, rows drawn from received mixtures may enlarge a class.
        if self.privacy is None and self.topology == "star":
            small = [n for rows in counts.values() for n in rows if 0 < n < self.min_count]
            return left_out({"withheld_rows": sum(small), "withheld_classes": len(small)}, self.min_count, False)
        return []

    def notices(self, state: State) -> list[str]:
        warnings = [f"{text[:1].lower()}{text[1:]}" for text in state.details.get("warnings", ())]
        return [*left_out(state.details, self.min_count, self.privacy is not None), *warnings]

    def details(self, state: State, judge: Judge | None) -> dict[str, Any]:
        found = dict(state.details)
        if state.heads and judge is not None:
            found["chain_accuracy"] = [judge(w)["accuracy"] for w in state.heads.values()]
        return found

    @property
    def means(self) -> tuple[str, ...]:  # type: ignore[override]
        """With ``pooled``, the handler that sends exact sums; otherwise no handler."""
        return ("sums",) if self.pooled and self.privacy is not None else ()

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """With ``pooled``, the server has a secret, the key of the noise. In a star, clients read no mixtures."""
        secrets, alone = ("noise",) if self.means else (), self.topology == "star" and not (self.means or self.verify)
        return Traits(server_secrets=secrets, hides_counts=self.counts != "exact", independent_messages=alone)

    @property
    def asks(self) -> tuple[str, ...]:  # type: ignore[override]
        """The handler that sends each client's mixtures, and with ``verify`` also the handler that counts errors."""
        if self.means:
            return ()
        if self.privacy is not None and self.topology != "star":
            return ("pass_noisy",)
        if self.privacy is not None:
            return ("release",)
        sent = "summarise" if self.topology == "star" else "pass_on"
        return (sent, "count_errors") if self.verify else (sent,)

    # --- settings -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        if self.counts == "withheld":
            rules.check_withheld_counts(vars(self))
        rules.check_topology(self.topology, self.edges, shuffle=self.shuffle, bound=self.bound)

    def settle(self, privacy: PrivacySpec | None) -> Self:
        covariance, components = ("diag", 10) if privacy is None else ("spherical", 1)
        unset: dict[str, Any] = {"covariance": covariance, "components": components}
        unset = {key: value for key, value in unset.items() if getattr(self, key) is None}
        return replace(self, **unset) if unset else self

    def protect(self, privacy: PrivacySpec) -> Self:
        method = copy.copy(self.settle(privacy))
        rules.check_private(privacy, vars(method))
        epsilon, delta = need(privacy.target_epsilon, "target_epsilon"), need(privacy.delta, "delta")
        plan = Plan(method.relation, method.shape, epsilon, delta, method.calibration)
        object.__setattr__(method, "privacy", plan)
        return method

    def spend(self, accountant: Accountant) -> None:
        if self.privacy is not None and self.rounds:
            private.spend(accountant, self.privacy, self.pooled)

    @property
    def noise_by(self) -> str:  # type: ignore[override]
        """With ``pooled`` the server adds the noise, else each client."""
        return "server" if self.pooled else "silo"

    @property
    def could_pool(self) -> bool:
        """Whether ``pooled`` is false, but could be true under [privacy]."""
        return not self.pooled and self.topology == "star" and self.calibration == "analytic"

    @property
    def _plan(self) -> Plan:
        assert self.privacy is not None  # noqa: S101 - only private runs call this
        return self.privacy

    def _most(self, client: Client | None = None) -> int:
        """The largest K of this client, or the setting for clients without a budget."""
        assert self.components is not None  # noqa: S101 - settle() has filled it in
        return self.budgets.get(client.id, self.components) if client else self.components

    @property
    def shape(self) -> str:
        """Form of the covariances."""
        assert self.covariance is not None  # noqa: S101 - settle() has filled it in
        return self.covariance


def _shape(model: Model) -> tuple[int, int]:
    """(number of classes, number of features)."""
    return len(model.classes), model.feature_dim
