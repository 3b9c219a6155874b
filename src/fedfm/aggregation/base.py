"""How a mean is made: a transport brings the updates, a rule makes one of them, a mechanism may add noise.

The transport decides what the server sees, the rule what one client can do, the mechanism what the mean tells. An
aggregation's name names its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedfm.core import update_metrics
from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.federation import Federation
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.running_mean import RunningMean

if TYPE_CHECKING:
    from fedfm.privacy.accountant import Accountant


class Transport:
    """How updates reach the rule, and what the server sees of them. Here: each one, in the clear.

    One that hides them sends messages of its own before and after the updates: ``fed.ask`` of handlers that are marked
    ``@on_client(kind="aggregate")``, and who did not answer is not in the reply. It keeps state in ``client.memory``
    and ``fed.memory``, under keys that begin with its class's name: a method keeps its own there.

    Attributes:
        form: what the server sees of a reply to the train message: plain, masked or encrypted.
        wire_type: what :meth:`protect` returns.
    """

    form = "plain"
    wire_type: Any = Update

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: what is sent instead of ``update``, which may stay in ``client.memory`` for a later message."""
        return update

    def updates(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Iterator[Update]:
        """Server half: the valid updates in order of names, or one that stands for their mean and their weight.

        When all have come, the means of their metrics are in ``fed``.
        """
        means = update_metrics.Means()
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
            means.add(update)
        fed.metrics.update(means.means())


class Mechanism:
    """What keeps the mean from telling of one client or record, and what that spends. Here: nothing."""

    def bounded(self, client: Client, update: Update) -> Update:
        """Client half: the update as the mechanism needs it, e.g. of bounded norm."""
        return update

    def released(self, fed: Federation, mean: Params) -> Params:
        """Server half: what the method gets instead of the mean of ``fed.heard`` updates."""
        return mean

    def spend(self, accountant: Accountant, rounds: int) -> None:
        """Compose what so many rounds release."""


class Aggregator:
    """Transport, rule and mechanism. Here the rule is sum_k n_k x_k / sum_k n_k; subclasses have another."""

    transport = Transport()
    mechanism = Mechanism()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What may have handlers at the client."""
        return self, self.transport, self.mechanism

    def least(self) -> int:
        """How many updates a mean needs."""
        return 1

    def protect(self, client: Client, update: Update) -> Any:
        """Client half: what is sent instead of ``update``."""
        return self.transport.protect(client, self.mechanism.bounded(client, update))

    def mean(
        self,
        fed: Federation,
        handler: Callable[..., Any],
        of: Iterable[ClientId] | None,
        payload: Mapping[str, Any],
        like: Layout,
    ) -> Params:
        """Server half: ask the clients; what the method gets."""
        updates = self.transport.updates(fed, handler, of, payload, like)
        return self.mechanism.released(fed, self.combined(fed, updates))

    def combined(self, fed: Federation, updates: Iterator[Update]) -> Params:
        """The rule. Here one running sum in memory, whatever the number of updates."""
        mean = RunningMean()
        for update in updates:
            mean.add(update.weight, update.delta)
        return mean.result()
