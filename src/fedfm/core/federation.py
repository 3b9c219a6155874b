"""Input of a method's server half: the clients, the calls ``ask`` and ``mean``, and the transcript."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints

from fedfm import seeds
from fedfm.core import update_metrics
from fedfm.core.checks import conform, match
from fedfm.core.client import ClientId, Update, action, each, no_secret
from fedfm.core.messages import REVEAL, ROUND, SCORES, Excluded, Link, Reply, Request, Streaming
from fedfm.core.transcript import Transcript
from fedfm.errors import E_CLIENT, E_DUPLICATE, E_READONLY, E_ROUND, E_TIMEOUT, ClientFault, RunError
from fedfm.linalg.out_of_core import VectorStore, to_file
from fedfm.linalg.params import Layout, Params

if TYPE_CHECKING:
    from fedfm.models.model import Model

# Largest L2 norm of a reply's parameters, and of each floating-point tensor in a reply. Honest updates have norms of
# some thousands; only sums of squares over 10^9 rows of norm 1,000 reach the limit. Below the limit nothing overflows
# in float32: 10^14 terms of this norm and of weight MAX_WEIGHT add up to 1e38, and a square, e.g. in a server's Adam,
# is 1e30.
MAX_NORM = 1e15
_REASON = 400  # largest number of characters of a stored reason


class Sampler(Protocol):
    """The part of a privacy mechanism that a federation uses. The mechanism may choose a round's clients."""

    @property
    def fraction(self) -> float | None:
        """Share of the clients in a round; if None, the method chooses the clients."""

    def cohort(self, fed: Federation) -> Sequence[ClientId]:
        """The clients of this round, in order of names."""


class Delivery(Protocol):
    """The part of a transport that a federation uses."""

    form: str  # form in which the server sees the updates: plain, masked or encrypted


class Aggregation(Protocol):
    """The part of an aggregation that a federation uses, see :class:`fedfm.aggregation.base.Aggregator`."""

    @property
    def transport(self) -> Delivery:
        """The transport, which delivers the updates."""

    @property
    def mechanism(self) -> Sampler:
        """The mechanism, which limits what a mean discloses."""

    def why_missing(self, metric: str) -> str:
        """Why ``fed.metrics`` has no metric of this name, and what to do."""

    def mean(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Params:
        """Ask the clients; return the combined update that the method gets."""


class Federation:
    """The server half's view: the clients, the calls ``ask`` and ``mean``, and the transcript of clients' replies.

    Attributes:
        clients: sorted names, in the same order on every engine.
        model: the server's copy of the model.
        initial: w_0, the trainable parameters before the first round.
        round: 1, 2, ... during a round; 0 before the first.
        call: number of the round's last call, from 1; a client reads the memory that earlier calls wrote.
        tell: shows a text to the user now, e.g. the progress of a long step; the run does not store it.
        excluded: clients left out so far, each with the reason.
        notices: messages of this round for the user.
        heard: number of valid replies to the method's last call; after :meth:`mean`, number of clients in the mean.
        metrics: means of the metrics in this round's updates, weighted like the updates.
        client_metrics: this round's metrics by client, if the metrics include scores on the client's own rows and the
            server sees single updates.
        secret: returns the server's 32 bytes for a name, from the operating system's entropy, constant in a run.
        in_flight: for each client with a request in flight, the request's (round, call). The reply may come in a later
            round, see the argument ``first`` of :meth:`exchange`.
        began: for each client that has given a valid reply, the round of the request that its last such reply answers.
        memory: the server's private memory at the last commit.
        store: bytes by name. An assignment returns when they are on the disk, where a resume within a round finds them.
        process_memory: an aggregation's state while this process runs; a resumed run starts without it.
    """

    def __init__(
        self,
        link: Link,
        *,
        model: Model,
        aggregator: Aggregation,
        seed: int = 0,
        min_clients: int | None = 1,
        on_excluded: Callable[[Excluded], None] = lambda excluded: None,
        secret: Callable[[str], bytes] = no_secret,
        memory: Callable[[int], MutableMapping[str, Any]] | None = None,
        store: MutableMapping[str, bytes] | None = None,
        tell: Callable[[str], None] = lambda text: None,
        diverged: Callable[[], str] = lambda: "",
    ) -> None:
        self._link, self._diverged = link, diverged
        self.secret = secret
        kept: dict[str, Any] = {}
        self._memory = memory or (lambda t: kept)
        self.memory = self._memory(0)
        self.store: MutableMapping[str, bytes] = {} if store is None else store
        self.tell = tell
        self.process_memory: dict[str, Any] = {}
        self.model = model
        self.initial: Params = to_file(model.params())
        self.aggregator: Aggregation = aggregator
        self.seed, self.min_clients = seed, min_clients
        self.round, self.call = 0, 0
        self.transcript = Transcript()
        self.excluded: list[Excluded] = []
        self.notices: list[str] = []
        self.heard = 0
        self.metrics: dict[str, float] = update_metrics.RoundMetrics(0, aggregator.why_missing)
        self.client_metrics: dict[ClientId, dict[str, float]] = {}
        self.cohort: tuple[ClientId, ...] = ()
        self.in_flight: dict[ClientId, tuple[int, int]] = {}
        self.began: dict[ClientId, int] = {}
        self._restored: dict[ClientId, tuple[int, int] | None] = {}  # restored clients and their new requests, if made
        self._on_excluded = on_excluded
        self.clients: tuple[ClientId, ...] = tuple(sorted(link.clients))

    @property
    def streams(self) -> bool:
        """Whether clients may answer in a later round than the one that asks them."""
        return isinstance(self._link, Streaming) and self._link.streams

    def begin(self, t: int) -> None:
        """Start round t, with its own random streams and metrics."""
        self.round, self.call, self.cohort, self.notices = t, 0, (), []
        self.metrics = update_metrics.RoundMetrics(t, self.aggregator.why_missing)
        self.client_metrics = {}
        self.memory = self._memory(t)

    def restore(self, in_flight: Mapping[ClientId, tuple[int, int]]) -> None:
        """Continue to wait for the replies to requests of an earlier process, if the link supports it.

        Args:
            in_flight: the value of the attribute ``in_flight`` at the commit from which the run continues.
        """
        if isinstance(self._link, Streaming) and self._link.streams:
            self.in_flight = {client: at for client, at in in_flight.items() if client in self.clients}
            self._restored = dict.fromkeys(self.in_flight)
            self._link.restore(self.in_flight)

    def commit(self) -> None:
        """Write the server's memory."""
        if hasattr(self.memory, "commit"):
            self.memory.commit()

    def seed_for(self, *purpose: str | int) -> int:
        """A seed of this round for one purpose."""
        return seeds.derive(self.seed, "server", self.round, *purpose)

    def sample(self, fraction: float) -> Sequence[ClientId]:
        """A cohort S_t of max(floor(C K), 1) of the K clients, C = ``fraction``, without replacement, sorted by name.

        Under [privacy] the mechanism may choose the cohort instead, e.g. by secret coins: then the cohort may be empty.

        Raises:
            RunError: the privacy accounting assumes another fraction.
        """
        mechanism = self.aggregator.mechanism
        if mechanism.fraction is not None:
            if not math.isclose(fraction, mechanism.fraction):
                raise RunError(f"fed.sample({fraction:g}): [privacy] assumes the fraction {mechanism.fraction:g}")
            return mechanism.cohort(self)
        return self.draw(fraction, self.round, "cohort")

    def draw(self, fraction: float, *purpose: str | int) -> Sequence[ClientId]:
        """Draw this share of the clients, at least one, for a purpose (see :mod:`fedfm.seeds`); sorted by name."""
        m = max(math.floor(fraction * len(self.clients) + 1e-9), 1)
        chosen = seeds.generator(self.seed, "server", *purpose).choice(len(self.clients), size=m, replace=False)
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
        form: str = "plain",
        down: str = "plain",
        **payload: Any,
    ) -> dict[ClientId, Any]:
        """Run a client handler in each silo. The server SEES each client's reply.

        The message has the handler's kind (see :func:`fedfm.core.client.on_client`), or ``query`` if it has none.

        Metrics of updates are recorded as in :meth:`mean`. Vectors that together exceed memory are stored in files (see
        ``fedfm.linalg.out_of_core``).

        Args:
            counted: whether these are the method's own messages, which ``bytes_up`` and ``bytes_down`` count.
            like: layout of parameters or of an update's delta; may differ by client.
            check: raises :class:`ClientFault` for a reply that the method cannot use; that client is left out.
            least: number of valid replies that the call needs; by default see :meth:`enough`.
            form: form of a reply as the server sees it, for the transcript: plain, masked or encrypted.
            down: form of the request.

        Raises:
            RunError: too few clients gave a valid reply.
        """
        kind = getattr(handler, "kind", "") or "query"
        hint = get_type_hints(handler)["return"]

        def check_reply(client: ClientId, value: Any) -> None:
            if like is not None:
                layout = like[client] if isinstance(like, each) else like
                match(value.delta if isinstance(value, Update) else value, layout, "delta")
            check(value)

        came = self.exchange(
            kind, handler, of, payload, hint, form=form, down=down, counted=counted, check=check_reply, least=least
        )
        store, means, replies = VectorStore(), update_metrics.Means(), dict[ClientId, Any]()
        for client, value in came:
            if isinstance(value, Update):
                means.add(value)
                value = replace(value, delta=store.put(value.delta))
            replies[client] = store.put(value) if isinstance(value, Params) else value
        self.metrics.update(means.means())
        return replies

    def notice(self, text: str) -> None:
        """Add a notice for the user: the run shows the text and stores it in its manifest."""
        self.notices.append(text)

    def exclude(self, client: ClientId, code: str, reason: str, part: str = ROUND) -> None:
        """Leave a client out of this round, or of a part of it, because of the client's reply."""
        self._exclude(client, ClientFault(code, reason), part)

    def mean(
        self,
        handler: Callable[..., Any],
        *,
        of: Iterable[ClientId] | None = None,
        like: Layout | None = None,
        **payload: Any,
    ) -> Params:
        """Weighted mean of the replies' deltas. The server sees only what the aggregator discloses.

        Args:
            like: layout of a delta; by default the layout of the model's parameters.

        Raises:
            RunError: too few clients gave a valid reply, see :meth:`enough`.
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
        down: str = "plain",
        counted: bool = True,
        check: Callable[[ClientId, Any], None] = lambda client, value: None,
        least: int | None = None,
        first: int | None = None,
    ) -> Iterator[tuple[ClientId, Any]]:
        """Deliver requests, check and record replies; yield (client, value) in order of names, for reproducible sums.

        A client without a valid reply is excluded from this round, with the reason.

        Args:
            first: on a streaming link, the number of valid replies after which the call ends. Replies to earlier calls
                of this kind count, too. All other requests stay in flight.
        """
        cohort = sorted(self.clients if of is None else of)
        name = f"{kind}.{action(handler)}"
        self.call += 1
        asked = dict.fromkeys(cohort, (self.round, self.call))
        if first is not None:
            asked |= self.in_flight
            instead = [client for client, at in self._restored.items() if at is None]
            self._restored |= dict.fromkeys(instead, (self.round, self.call))
            cohort = sorted({*cohort, *instead})
        elif counted and not self.cohort:
            self.cohort = tuple(cohort)
        varying = [k for k, v in payload.items() if isinstance(v, each)]
        rows = rows if isinstance(rows := payload.get("part"), str) else ""

        def request(client: ClientId) -> Request:
            own = {**payload, **{k: payload[k][client] for k in varying}} if varying else payload
            return Request(client, name, own, self.round, self.call)

        pending, part = set(asked), kind if kind in (SCORES, REVEAL) else ROUND
        early: dict[ClientId, Any] = {}  # valid replies that wait for an earlier client in the order
        turns, good, before = sorted(pending, reverse=True), 0, len(self.excluded)
        link: Any = self._link
        deliver = link.exchange if first is None else lambda requests: link.stream(requests, request)
        for reply in deliver([request(client) for client in cohort]) if pending else ():
            try:
                self._check_expected(reply, pending, asked)
            except ClientFault as fault:  # the expected reply may still come
                self._exclude(reply.client, fault, part)
                continue
            pending.remove(reply.client)
            self._restored.pop(reply.client, None)
            self.transcript.add_exchange(
                reply, name, self.round, self.call, form=form, down=down, counted=counted, part=rows
            )
            try:
                if reply.fault is not None:
                    raise reply.fault
                value = conform(reply.value, hint, most=MAX_NORM)
                if metrics := getattr(value, "metrics", None):
                    update_metrics.check_figures(metrics, self.model.task.figures)
                check(reply.client, value)
            except ClientFault as fault:
                if fault.code == E_READONLY:  # other clients and the server may already have read the changed tensor
                    raise RunError(f"round {self.round}: {fault.reason}") from None
                self._exclude(reply.client, fault, part)
            else:
                early[reply.client] = value
                self.began[reply.client] = reply.round
                good += 1
                if isinstance(value, Update) and update_metrics.by_client(value.metrics):
                    self.client_metrics.setdefault(reply.client, {}).update(value.metrics)
            while first is None and turns and turns[-1] not in pending:
                if (client := turns.pop()) in early:
                    yield client, early.pop(client)
            if good == first:
                break
        if first is None:
            for client in sorted(pending):
                self._exclude(client, ClientFault(E_TIMEOUT, "no reply in time"), part)
        else:
            awaited = self._link.requests_in_flight if isinstance(self._link, Streaming) else {}
            self.in_flight = {client: awaited.get(client) or asked[client] for client in sorted({*pending, *awaited})}
            self.cohort = tuple(sorted(early))
        yield from sorted(early.items())
        self.excluded[before:] = sorted(self.excluded[before:], key=lambda e: (e.client, e.code))
        if kind != "aggregate":
            self.heard = good
        self.suffice(good, len(cohort) if first is None else first, name, before, least)

    def suffice(self, good: int, wanted: int, name: str, before: int, least: int | None = None) -> None:
        """Check that enough clients gave a valid reply.

        Args:
            good: number of valid replies.
            wanted: number of clients that were asked.
            name: the message's name.
            before: length of ``excluded`` when the clients were asked.
            least: number of valid replies that are needed; by default see :meth:`enough`.

        Raises:
            RunError: the replies are too few; the message has the reasons.
        """
        if good < (needed := self.enough(wanted) if least is None else least):
            from fedfm.core.reasons import reasons

            why = reasons(self.excluded[before:], self._diverged())
            raise RunError(
                f"round {self.round}: {good} of {wanted} clients gave a valid reply to {name}, "
                f"{needed} are needed (run.min_clients){why}"
            )

    def enough(self, asked: int) -> int:
        """The number of asked clients that must answer: ``run.min_clients``, by default half of them."""
        return max(1, -(-asked // 2)) if self.min_clients is None else self.min_clients

    def _check_expected(self, reply: Reply, pending: set[ClientId], asked: Mapping[ClientId, tuple[int, int]]) -> None:
        """Check that this is the client's first reply to this call, or to an earlier one in flight."""
        if reply.client not in pending:
            code, why = (E_DUPLICATE, "a second reply to one request"), (E_CLIENT, "was not asked in this call")
            raise ClientFault(*(code if reply.client in asked else why))
        if (reply.round, reply.call) not in (asked[reply.client], self._restored.get(reply.client)):
            raise ClientFault(E_ROUND, f"a reply to round {reply.round}, call {reply.call}")

    def _exclude(self, client: ClientId, fault: ClientFault, part: str) -> None:
        reason = fault.reason[:_REASON]  # the client may have written this text
        excluded = Excluded(self.round, client, fault.code, reason, part)
        self.excluded.append(excluded)
        self._on_excluded(excluded)
