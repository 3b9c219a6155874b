"""Aggregation: a transport delivers the updates, a rule combines them, and a mechanism may add noise.

The transport determines what the server sees. The rule limits the influence of a client. The mechanism limits what the
mean discloses. An aggregation has the name of its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core import update_metrics
from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.federation import Federation
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.running_mean import RunningMean

if TYPE_CHECKING:
    from fedfm.core.method import Method
    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant
    from fedfm.privacy.dp_sgd import DescentPlan

Half = Callable[..., Any]  # a client half: the part of a method that runs at the client
Of = Iterable[ClientId] | None  # the clients to ask; None: all clients
Payload = Mapping[str, Any]
Rule = Callable[[Federation, Iterator[Update]], Params]


class Transport:
    """Delivers updates to the rule, and determines what the server sees. This class sends each update in the clear.

    A transport that hides updates exchanges its own messages before and after them: it calls ``fed.ask`` with handlers
    marked ``@on_client(kind="aggregate")``. A client that did not answer is missing in the replies. A transport keeps
    its state in ``client.memory`` and ``fed.memory`` under keys that begin with its class name, because methods also
    keep state there.

    Attributes:
        form: how the server sees a reply to the train message: plain, masked or encrypted.
        wire_type: the type that :meth:`protect` returns.
        message_type: type of the payload's entry ``AGGREGATION_MESSAGE``, which :meth:`updates` may add and
            :meth:`protect` reads as ``client.aggregation_message``.
        figures: names of the metrics in ``fed.metrics`` that a round's printed line shows.
    """

    figures: ClassVar[tuple[str, ...]] = ()
    form = "plain"
    wire_type: Any = Update
    message_type: Any = None

    def why_missing(self, metric: str) -> str:
        """Why ``fed.metrics`` has no metric of this name, and how to get it."""
        return f'no client reported it; the client half returns it: Update(..., client.metrics | {{"{metric}": ...}})'

    def ready(self, client: Client) -> None:
        """Client half: check the request before any row is read, so that a refusal discloses nothing about rows.

        Raises:
            ClientFault: the request is refused; the fault gives the reason.
        """

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: the message to send in place of ``update``.

        The client may keep the update in ``client.memory`` for later messages.
        """
        return update

    def blank(self, client: Client) -> Any | None:
        """Client half: a message of zeros that looks like any update; None if this transport does not hide updates."""
        return None

    def updates(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Iterator[Update]:
        """Server half: the valid updates in order of names, or one update with their mean and the sum of their weights.

        Afterwards ``fed.metrics`` has the means of the updates' metrics.
        """
        means = update_metrics.Means()

        changed = getattr(fed.aggregator.mechanism, "withholds", False)  # then the update has noise
        refuse = None if changed else getattr(getattr(handler, "__self__", None), "check_update", None)

        def check(client: ClientId, update: Update) -> None:
            match(update.delta, like, "delta")
            if refuse is not None:  # see fedfm.core.kept_sums.ChecksUpdates
                refuse(handler.__name__, client, update, fed)

        asked = fed.clients if of is None else tuple(of)
        # Stopping because few clients were drawn would disclose the draw, so only drawn clients that fail count as
        # missing.
        least = min(fed.enough(len(asked)), len(asked)) if fed.aggregator.mechanism.fraction is not None else None
        replies = fed.exchange(
            "train", handler, asked, payload, self.wire_type, form=self.form, check=check, least=least
        )
        for _, update in replies:
            yield update
            means.add(update)
        fed.metrics.update(means.means())


class Mechanism:
    """Limits and accounts for what the mean discloses about a client or record. This class does nothing.

    Attributes:
        secrets: names of the secrets that the mechanism draws at the server.
        message_type: type of the payload's entry ``SCALE``, which :meth:`message` may add.
        figures: names of the metrics in ``fed.metrics`` that a round's printed line shows.
        fresh: whether a round that a resume repeats gets new noise. If so, a reader of the first result sees one more
            release.
        withholds: whether the metrics of updates stay at the clients.
        period: number of groups of clients that take turns, one group per round.
    """

    secrets: ClassVar[tuple[str, ...]] = ()
    message_type: ClassVar[Any] = None
    figures: ClassVar[tuple[str, ...]] = ()
    fresh: ClassVar[bool] = False
    withholds: ClassVar[bool] = False
    period = 1

    @property
    def plan(self) -> DescentPlan | None:
        """The plan for clients that train by DP-SGD; None: clients train without noise."""
        return None

    @property
    def fraction(self) -> float | None:
        """Fraction of the clients in a round, if :meth:`cohort` chooses them; None: the method chooses them."""
        return None

    def fits(self, model: Model) -> None:
        """Refuse a model whose parameters the mechanism cannot protect; called before the first round.

        Raises:
            InputError: the mechanism cannot protect this model; the error names a model that would work.
        """

    def cohort(self, fed: Federation) -> Sequence[ClientId]:
        """Server half: the clients of this round, sorted by name."""
        return fed.clients

    def divisor(self, fed: Federation, asked: Sequence[ClientId]) -> float:
        """Server half: the divisor of a mean over these clients, for :meth:`release`."""
        return len(asked)

    def message(self, fed: Federation) -> Payload:
        """Server half: entries of the train message that :meth:`bound` reads."""
        return {}

    def bound(self, client: Client, update: Update) -> Update:
        """Client half: bound the update as the mechanism needs it, e.g. its norm."""
        return update

    def blank(self, client: Client) -> Update | None:
        """Client half: a bounded update of zeros if the mechanism counts it like any update, else None."""
        return None

    def wire(self, like: Layout) -> Layout:
        """Layout of the deltas that :meth:`bound` returns; ``like`` is the layout of the method's deltas."""
        return like

    def release(self, fed: Federation, updates: Iterator[Update], rule: Rule, asked: float, like: Layout) -> Params:
        """Server half: the mean that the method gets from the updates of ``asked`` clients. Here it is the rule's
        result.
        """
        return rule(fed, updates)

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        """Add the releases of this number of rounds to the accountant.

        Args:
            rows: the clients' numbers of rows; None if the server does not know them.
        """

    def repeat_count(self, store: Mapping[str, bytes]) -> int:
        """Number of rounds whose sum was released a second time, according to the server's store.

        Each of them is one more release.
        """
        return 0

    def check(self, fed: Federation, model_of: Callable[[Any], Params], before: Any, after: Any) -> None:
        """Check the server's model in its states before and after the first round.

        Raises:
            RunError: the model did not change as the mechanism would have changed it.
        """

    def affordable(self, rounds: int) -> int:
        """How many of these rounds the budget for epsilon allows."""
        return rounds


class Aggregator:
    """Transport, rule and mechanism. The rule here is sum_k n_k x_k / sum_k n_k; subclasses define others."""

    transport = Transport()
    mechanism = Mechanism()  # [privacy] replaces it in an instance, see fedfm.aggregation.private.under

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects that may have handlers at the clients."""
        return self, self.transport, self.mechanism

    def least(self) -> int:
        """The smallest number of updates that a mean needs."""
        return 1

    def why_missing(self, metric: str) -> str:
        """Why ``fed.metrics`` has no metric of this name, and how to get it."""
        if self.mechanism.withholds:
            return "under [privacy] metrics stay at the clients; a method that needs one cannot run with this mechanism"
        return self.transport.why_missing(metric)

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: the message to send in place of ``update``."""
        return self.transport.protect(client, self.mechanism.bound(client, update))

    def blank(self, client: Client) -> Any | None:
        """Client half: the message of a client that has no update, so that its failure discloses nothing.

        The server can send a model with which an update overflows. A refusal would then answer a question about rows,
        and no budget counts this answer. The result is None if the server sees single updates, because such a server
        sees the failure anyway.
        """
        empty = self.mechanism.blank(client)
        return self.transport.blank(client) if empty is None else self.transport.protect(client, empty)

    def mean(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Params:
        """Server half: ask the clients; return the combined update that the method gets."""
        asked = fed.clients if of is None else tuple(of)
        mechanism = self.mechanism
        over, payload = mechanism.divisor(fed, asked), {**payload, **mechanism.message(fed)}
        updates = self.transport.updates(fed, handler, asked, payload, mechanism.wire(like))
        return mechanism.release(fed, updates, self.reduce, over, like)

    def reduce(self, fed: Federation, updates: Iterator[Update]) -> Params:
        """The rule: the weighted mean, with one running sum in memory for any number of updates."""
        mean = RunningMean()
        for update in updates:
            mean.add(update.weight, update.delta)
        return mean.result()


def secrets_of(method: Method[Any], aggregator: Aggregator) -> tuple[str, ...]:
    """Names of the secrets that the server draws, for the method and for the aggregation's mechanism."""
    return (*method.traits.server_secrets, *aggregator.mechanism.secrets)
