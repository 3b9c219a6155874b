"""How a mean is made: a transport delivers the updates, a rule combines them, a mechanism may add noise.

The transport decides what the server sees, the rule how much one client can change, the mechanism what the mean
reveals. The name of an aggregation is that of its rule.
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
    from fedfm.models.model import Model
    from fedfm.privacy.accountant import Accountant
    from fedfm.privacy.dp_sgd import DescentPlan

Half = Callable[..., Any]  # a method's client half
Of = Iterable[ClientId] | None  # whom to ask; None: all clients
Payload = Mapping[str, Any]
Rule = Callable[[Federation, Iterator[Update]], Params]


class Transport:
    """How updates reach the rule, and what the server sees of them. This one sends each update in the clear.

    A transport that hides updates sends messages of its own before and after them: ``fed.ask`` of handlers marked
    ``@on_client(kind="aggregate")``; a client that did not answer is missing from the replies. It keeps state in
    ``client.memory`` and ``fed.memory`` under keys that begin with its class name, because methods keep state there
    too.

    Attributes:
        form: what the server sees of a reply to the train message: plain, masked or encrypted.
        wire_type: the type that :meth:`protect` returns.
        told_type: of the payload's entry ``TOLD``, which :meth:`updates` may add and :meth:`protect` finds as
            ``client.told``.
        figures: names in ``fed.metrics`` that the line of a round shows.
    """

    figures: ClassVar[tuple[str, ...]] = ()
    form = "plain"
    wire_type: Any = Update
    told_type: Any = None

    def why_missing(self, metric: str) -> str:
        """Why ``fed.metrics`` has none of this name, and what would be right."""
        return f'no client reported it; the client half returns it: Update(..., client.metrics | {{"{metric}": ...}})'

    def ready(self, client: Client) -> None:
        """Client half: check what the server asks before any row is read, so that a refusal tells of none.

        Raises:
            ClientFault: with the reason.
        """

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: what to send instead of ``update``, which may stay in ``client.memory`` for a later message."""
        return update

    def blank(self, client: Client) -> Any | None:
        """Client half: what to send if there is no update, and nobody can tell from one; None: all can tell."""
        return None

    def updates(self, fed: Federation, handler: Half, of: Of, payload: Payload, like: Layout) -> Iterator[Update]:
        """Server half: the valid updates in order of names, or one that stands for their mean and their weight.

        Afterwards ``fed.metrics`` holds the means of their metrics.
        """
        means = update_metrics.Means()

        def check(client: ClientId, update: Update) -> None:
            match(update.delta, like, "delta")

        asked = fed.clients if of is None else tuple(of)
        # A stop because few were drawn would tell who was; only those who were and failed are missed.
        least = min(fed.enough(len(asked)), len(asked)) if fed.aggregator.mechanism.fraction is not None else None
        came = fed.exchange("train", handler, asked, payload, self.wire_type, form=self.form, check=check, least=least)
        for _, update in came:
            yield update
            means.add(update)
        fed.metrics.update(means.means())


class Mechanism:
    """What limits how much the mean reveals of one client or record, and what that spends. This one does nothing.

    Attributes:
        secrets: names of the server's secrets that it draws.
        told_type: of the payload's entry ``SCALE``, which :meth:`message` may add.
        figures: names in ``fed.metrics`` that the line of a round shows.
        fresh: a round that a resume repeats gets other noise: it is one release more to who saw it before.
        withholds: the metrics of updates stay at the clients.
    """

    secrets: ClassVar[tuple[str, ...]] = ()
    told_type: ClassVar[Any] = None
    figures: ClassVar[tuple[str, ...]] = ()
    fresh: ClassVar[bool] = False
    withholds: ClassVar[bool] = False

    @property
    def plan(self) -> DescentPlan | None:
        """Of clients that train by DP-SGD; None: they train without noise."""
        return None

    @property
    def fraction(self) -> float | None:
        """Share of the clients in a round, if :meth:`cohort` chooses them; None: the method does."""
        return None

    def fits(self, model: Model) -> None:
        """Refuse a model whose parameters the mechanism cannot protect; a run does it before its first round.

        Raises:
            InputError: with what would be right.
        """

    def cohort(self, fed: Federation) -> Sequence[ClientId]:
        """Server half: the clients of this round, in order of names."""
        return fed.clients

    def divisor(self, fed: Federation, asked: Sequence[ClientId]) -> float:
        """Server half: the number of clients of a mean that asks these, for :meth:`release`."""
        return len(asked)

    def message(self, fed: Federation) -> Payload:
        """Server half: what the train message says to :meth:`bound`."""
        return {}

    def bound(self, client: Client, update: Update) -> Update:
        """Client half: the update as the mechanism needs it, e.g. of bounded norm."""
        return update

    def blank(self, client: Client) -> Update | None:
        """Client half: :meth:`bound` of no change at all, if that counts like any update; None: it does not."""
        return None

    def wire(self, like: Layout) -> Layout:
        """Layout of the deltas that :meth:`bound` returns, if the method's are ``like``."""
        return like

    def release(self, fed: Federation, updates: Iterator[Update], rule: Rule, asked: float, like: Layout) -> Params:
        """Server half: what the method gets for the updates of ``asked`` clients, by default what the rule makes."""
        return rule(fed, updates)

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        """Compose what this number of rounds releases.

        Args:
            rows: the clients' numbers of rows; None if the server does not know them.
        """

    def repeat_count(self, store: Mapping[str, bytes]) -> int:
        """How many rounds were released again with another sum, by the server's store: each is one release more."""
        return 0

    def check(self, fed: Federation, model_of: Callable[[Any], Params], before: Any, after: Any) -> None:
        """Check the server's model in its states before and after the first round.

        Raises:
            RunError: it did not change as the mechanism would have changed it.
        """

    def affordable(self, rounds: int) -> int:
        """How many of this number of rounds a budget allows."""
        return rounds


class Aggregator:
    """Transport, rule and mechanism. The rule is sum_k n_k x_k / sum_k n_k; subclasses replace it."""

    transport = Transport()
    mechanism = Mechanism()  # under [privacy] of an instance: see fedfm.aggregation.private.under

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects that may have handlers at the client."""
        return self, self.transport, self.mechanism

    def least(self) -> int:
        """Number of updates that a mean needs."""
        return 1

    def why_missing(self, metric: str) -> str:
        """Why ``fed.metrics`` has none of this name, and what would be right."""
        if self.mechanism.withholds:
            return "under [privacy] metrics stay at the clients; a method that needs one cannot run with this mechanism"
        return self.transport.why_missing(metric)

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: what to send instead of ``update``."""
        return self.transport.protect(client, self.mechanism.bound(client, update))

    def blank(self, client: Client) -> Any | None:
        """Client half: what to send in place of an update that there is none of, so that the failure tells nothing.

        A refusal would be a question about rows that no budget counts: the server chooses the weights with which an
        update overflows. None: the server sees single updates, and is told the failure.
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
        """The rule: one running sum in memory, for any number of updates."""
        mean = RunningMean()
        for update in updates:
            mean.add(update.weight, update.delta)
        return mean.result()
