"""What each half of a method can touch: ``Client`` in the silo, ``Federation`` at the server."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from torch import Tensor

from fedfm import seeds
from fedfm.conform import conform, match
from fedfm.errors import (
    E_CLIENT,
    E_DUPLICATE,
    E_READONLY,
    E_ROUND,
    E_TIMEOUT,
    E_WEIGHT,
    ClientFault,
    RunError,
)
from fedfm.means import Mean
from fedfm.params import Layout, Params
from fedfm.rows import Batch, Rows
from fedfm.spill import Shelf
from fedfm.transcript import Crossing, Transcript

ClientId = str  # the name a silo gives itself, e.g. "hospital-a"
Handler = TypeVar("Handler", bound=Callable[..., Any])
MAX_WEIGHT = 1e9  # nobody has more rows: a larger weight would let one client replace the mean
# Of a reply's parameters, and of any floating-point tensor in it. Honest updates have norms of some thousands, and sums
# of squares over 10^9 rows of norm 1,000 just reach it. Below it nothing overflows float32: 10^14 terms of this norm
# and MAX_WEIGHT add up to 1e38, and a square, as of a server's Adam, is 1e30.
MAX_NORM = 1e15


class Model(Protocol):
    """What methods and client optimisers use of a model: trainable parameters in, parameters and losses out."""

    task: str
    classes: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """Names, dtypes and shapes of :meth:`params`."""

    def params(self) -> Params:
        """A copy of the trainable tensors."""

    def load(self, w: Params) -> None:
        """Take these trainable tensors; a mismatch raises."""

    def live(self) -> dict[str, Tensor]:
        """The trainable leaf tensors themselves."""

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of a batch, a scalar."""

    def predict(self, rows: Rows) -> Tensor:
        """Logits (n, C)."""

    def evaluate(self, rows: Rows) -> dict[str, Any]:
        """Accuracy, loss and the like."""


class ClientData:
    """One client's rows, ready for the model: ``train``, ``val`` and ``test``, each made when it is first asked for."""

    def __init__(self, train: Callable[[], Rows], val: Callable[[], Rows], test: Callable[[], Rows]) -> None:
        self._make = {"train": train, "val": val, "test": test}

    @functools.cached_property
    def train(self) -> Rows:
        """Rows to train on."""
        return self._make["train"]()

    @functools.cached_property
    def val(self) -> Rows:
        """Rows that decide (early stopping, tuning); never test rows."""
        return self._make["val"]()

    @functools.cached_property
    def test(self) -> Rows:
        """Rows that judge."""
        return self._make["test"]()


def _no_secret(name: str) -> bytes:
    raise RuntimeError(f"no secret {name}: whoever made this party gave it none")


@dataclass
class Client:
    """Everything the client half may use. Nothing here leaves the silo unless a handler returns it.

    Attributes:
        memory: survives between messages and rounds; never sent.
        seed: of this client in this round; derive from it what is random.
        metrics: what the client optimiser noted about its last pass, e.g. ``loss``.
        secret: 32 bytes under a name, from the operating system's entropy, the same for the whole run; never sent.
        trained: what the client optimiser returned last: the client's model before any aggregation.
    """

    id: ClientId
    data: ClientData
    model: Any  # Model; methods of one family use more of it than the protocol
    memory: MutableMapping[str, Any]
    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    secret: Callable[[str], bytes] = _no_secret
    trained: Params | None = None


@dataclass(frozen=True)
class Update:
    """The usual reply: a change of parameters and its weight in the mean (n_k unless the method says otherwise)."""

    delta: Params
    weight: float
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= MAX_WEIGHT:  # NaN fails too
            raise ClientFault(E_WEIGHT, f"weight {self.weight} is not in (0, {MAX_WEIGHT:g}]")


class each(dict[ClientId, Any]):
    """A payload that differs by client."""


def on_client(handler: Handler) -> Handler:
    """Mark the client half: it runs in a silo, called by message."""
    handler.on_client = True  # type: ignore[attr-defined]
    return handler


def action(handler: Callable[..., Any]) -> str:
    """The wire name of a handler: its class and its name."""
    return f"{type(handler.__self__).__name__}_{handler.__name__}"  # type: ignore[attr-defined]


class Request(NamedTuple):
    """One message to one client: call ``handler`` (``train.X`` or ``query.X``) with ``payload``.

    (round, call) names the request: a reply carries both back, and a client's memory is versioned by them.
    """

    client: ClientId
    handler: str
    payload: Mapping[str, Any]
    round: int
    call: int


class Reply(NamedTuple):
    """What came back: a value, or the fault that took its place.

    Attributes:
        nbytes_down, nbytes_up: of request and reply as Flower serialises their records.
    """

    client: ClientId
    value: Any
    round: int
    call: int
    nbytes_down: int = 0
    nbytes_up: int = 0
    fault: ClientFault | None = None


class Link(Protocol):
    """An engine, as the server sees it: deliver requests, yield replies as they come."""

    @property
    def clients(self) -> Sequence[ClientId]:
        """Names of the clients, sorted."""

    def exchange(self, requests: Sequence[Request]) -> Iterator[Reply]:
        """Deliver; yield at most one reply a request, in any order; what has not come in time is not yielded."""


@dataclass(frozen=True)
class Excluded:
    """A client left out of a round, and why."""

    round: int
    client: ClientId
    code: str
    reason: str

    def __str__(self) -> str:
        return f"round {self.round}: {self.client} left out, {self.code}: {self.reason}"


class Federation:
    """The server half's view: the clients, two verbs, and the transcript of what they exposed.

    Attributes:
        clients: names, sorted: the same order on every engine.
        model: the server's copy of the model.
        initial: w_0, the trainable parameters before the first round.
        round: 1, 2, ... while a round runs; 0 before the first.
        excluded: who was left out so far, with the reason.
        heard: how many clients of the last call gave a valid reply.
        metrics: what the clients' updates of this round noted, as means weighted like the updates.
        secret: the server's own: 32 bytes under a name, from the operating system's entropy, the same all run long.
        memory: the server's own, of what belongs to no file that anybody else sees; as of the last committed round.
    """

    def __init__(
        self,
        link: Link,
        *,
        model: Any,
        aggregator: Aggregator | None = None,
        seed: int = 0,
        min_clients: int = 1,
        on_excluded: Callable[[Excluded], None] = lambda excluded: None,
        secret: Callable[[str], bytes] = _no_secret,
        memory: Callable[[int], MutableMapping[str, Any]] | None = None,
    ) -> None:
        self._link = link
        self.secret = secret
        kept: dict[str, Any] = {}
        self._memory = memory or (lambda t: kept)
        self.memory = self._memory(0)
        self.model = model
        self.initial: Params = model.params()
        self.aggregator = aggregator or Aggregator()
        self.seed, self.min_clients = seed, min_clients
        self.round, self._call = 0, 0
        self.transcript = Transcript()
        self.excluded: list[Excluded] = []
        self.heard = 0
        self.metrics: dict[str, float] = {}
        self.cohort: tuple[ClientId, ...] = ()
        self._on_excluded = on_excluded
        self.clients: tuple[ClientId, ...] = tuple(sorted(link.clients))

    def begin(self, t: int) -> None:
        """Start round t: its random streams, its metrics."""
        self.round, self._call, self.metrics, self.cohort = t, 0, {}, ()
        self.memory = self._memory(t)

    def commit(self) -> None:
        """Keep what the server's half has put into its memory."""
        if hasattr(self.memory, "commit"):
            self.memory.commit()

    def seed_for(self, *purpose: str | int) -> int:
        """A seed of this round for one purpose."""
        return seeds.derive(self.seed, "server", self.round, *purpose)

    def sample(self, fraction: float) -> Sequence[ClientId]:
        """A cohort S_t of max(floor(C K), 1) clients, drawn without replacement, in order of names."""
        m = max(math.floor(fraction * len(self.clients) + 1e-9), 1)
        rng = seeds.generator(self.seed, "server", self.round, "cohort")
        chosen = rng.choice(len(self.clients), size=m, replace=False)
        return [self.clients[i] for i in sorted(chosen)]

    def ask(
        self,
        handler: Callable[..., Any],
        *,
        of: Iterable[ClientId] | None = None,
        counted: bool = True,
        like: Layout | each | None = None,
        check: Callable[[Any], None] = lambda value: None,
        least: int | None = None,
        **payload: Any,
    ) -> dict[ClientId, Any]:
        """Run a client handler in each silo. The server SEES each client's reply.

        Replies that are updates note their metrics, as those of :meth:`mean` do. Vectors that do not fit into memory
        together lie in files (see ``fedfm.spill``).

        Args:
            like: what parameters, or an update's delta, must look like; may differ by client.
            check: raises :class:`ClientFault` for a reply that the method cannot use; that client is left out.
            least: valid replies that the call needs; by default ``min_clients``.

        Raises:
            RunError: fewer than that gave a valid reply.
        """
        hint = get_type_hints(handler)["return"]

        def checked(client: ClientId, value: Any) -> None:
            if like is not None:
                layout = like[client] if isinstance(like, each) else like
                match(value.delta if isinstance(value, Update) else value, layout, "delta")
            check(value)

        came = self.exchange("query", handler, of, payload, hint, counted=counted, check=checked, least=least)
        shelf, noted, replies = Shelf(), _Noted(), dict[ClientId, Any]()
        for client, value in came:
            if isinstance(value, Update):
                noted.add(value)
                value = replace(value, delta=shelf.put(value.delta))
            replies[client] = shelf.put(value) if isinstance(value, Params) else value
        self.metrics.update(noted.means())
        return replies

    def exclude(self, client: ClientId, code: str, reason: str) -> None:
        """Leave a client out of this round for what the method found in its reply."""
        self._exclude(client, ClientFault(code, reason))

    def mean(
        self,
        handler: Callable[..., Any],
        *,
        of: Iterable[ClientId] | None = None,
        like: Layout | None = None,
        **payload: Any,
    ) -> Params:
        """Weighted mean of the replies' deltas. The server sees only what the aggregator shows it.

        Args:
            like: what a delta must look like; by default the model's own parameters.

        Raises:
            RunError: fewer than ``min_clients`` gave a valid reply.
        """
        return self.aggregator.mean(self, handler, of, payload, like or self.initial.layout)

    def exchange(
        self,
        kind: str,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        hint: Any,
        *,
        form: str = "plain",
        counted: bool = True,
        check: Callable[[ClientId, Any], None] = lambda client, value: None,
        least: int | None = None,
    ) -> Iterator[tuple[ClientId, Any]]:
        """Deliver, validate, record; yield (client, value) in order of names, so that sums do not depend on timing.

        A client whose reply is absent or not valid is excluded from this round with a line that says why.
        """
        cohort = sorted(self.clients if of is None else of)
        name = f"{kind}.{action(handler)}"
        self._call += 1
        if counted and not self.cohort:
            self.cohort = tuple(cohort)
        varying = [k for k, v in payload.items() if isinstance(v, each)]
        requests = [
            Request(
                c,
                name,
                {**payload, **{k: payload[k][c] for k in varying}} if varying else payload,
                self.round,
                self._call,
            )
            for c in cohort
        ]
        pending = set(cohort)
        early: dict[ClientId, Any] = {}  # valid, but another's turn
        turns, good, before = list(reversed(cohort)), 0, len(self.excluded)
        for reply in self._link.exchange(requests):
            try:
                self._expected(reply, pending, cohort)
            except ClientFault as fault:  # says nothing about the reply that is still to come, if any
                self._exclude(reply.client, fault)
                continue
            pending.remove(reply.client)
            self._record(name, reply, form, counted)
            try:
                if reply.fault is not None:
                    raise reply.fault
                value = conform(reply.value, hint, most=MAX_NORM)
                check(reply.client, value)
            except ClientFault as fault:
                if fault.code == E_READONLY:  # later clients, and the server, may have seen the changed tensor
                    raise RunError(f"round {self.round}: {fault.reason}") from None
                self._exclude(reply.client, fault)
            else:
                early[reply.client] = value
                good += 1
            while turns and turns[-1] not in pending:
                if (client := turns.pop()) in early:
                    yield client, early.pop(client)
        for client in sorted(pending):
            self._exclude(client, ClientFault(E_TIMEOUT, "no reply in time"))
        yield from sorted(early.items())
        self.excluded[before:] = sorted(self.excluded[before:], key=lambda e: (e.client, e.code))
        self.heard = good
        if good < (self.min_clients if least is None else least):
            raise RunError(
                f"round {self.round}: {good} of {len(cohort)} clients gave a valid reply to {name}, "
                f"min_clients is {self.min_clients}"
            )

    def _expected(self, reply: Reply, pending: set[ClientId], cohort: Sequence[ClientId]) -> None:
        """It answers this call, and is the first that does."""
        if reply.client not in pending:
            code, why = (E_DUPLICATE, "a second reply to one request"), (E_CLIENT, "was not asked in this call")
            raise ClientFault(*(code if reply.client in cohort else why))
        if (reply.round, reply.call) != (self.round, self._call):
            raise ClientFault(E_ROUND, f"a reply to round {reply.round}, call {reply.call}")

    def _exclude(self, client: ClientId, fault: ClientFault) -> None:
        excluded = Excluded(self.round, client, fault.code, fault.reason)
        self.excluded.append(excluded)
        self._on_excluded(excluded)

    def _record(self, name: str, reply: Reply, form: str, counted: bool) -> None:
        down = Crossing(self.round, "server", reply.client, name, reply.nbytes_down, "plain", counted)
        self.transcript.add(down)
        if reply.nbytes_up:
            self.transcript.add(Crossing(self.round, reply.client, "server", name, reply.nbytes_up, form, counted))


class Aggregator:
    """How sum_k n_k x_k / sum_k n_k is computed, and what the server sees meanwhile. Here: every update, in the clear.

    Subclasses mask, encrypt or add noise: ``protect`` is the client half, ``mean`` the server half.
    """

    form = "plain"
    wire_type: Any = Update

    def least(self) -> int:
        """How many updates a mean needs."""
        return 1

    def validate(self) -> None:
        """Refuse parameters that make no sense.

        Raises:
            InputError: with the key and what would be right.
        """

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: what is sent instead of ``update``."""
        return update

    def mean(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Params:
        """Server half: one running sum in memory, whatever the number of clients."""
        mean = Mean()
        for update in self.updates(fed, handler, of, payload, like):
            mean.add(update.weight, update.delta)
        return mean.result()

    def updates(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Iterator[Any]:
        """The valid replies, in order of names; when all have come, the means of their metrics are in ``fed``."""
        noted = _Noted()
        replies = fed.exchange(
            "train",
            handler,
            of,
            payload,
            self.wire_type,
            form=self.form,
            check=lambda client, u: match(u.delta, like, "delta"),
        )
        for _, update in replies:
            yield update
            noted.add(update)
        fed.metrics.update(noted.means())


class _Noted:
    """What updates note, as means weighted like the updates."""

    def __init__(self) -> None:
        self._weight, self._sums = 0.0, dict[str, float]()

    def add(self, update: Any) -> None:
        """One update more."""
        self._weight += update.weight
        for name, value in update.metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + update.weight * value

    def means(self) -> dict[str, float]:
        """By name; without those that overflowed: each value was finite, their weighted sum need not be."""
        means = {name: total / self._weight for name, total in self._sums.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}
