"""What every rule is built on: the plain mean, which shows the server every update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from fedfm.core import update_metrics
from fedfm.core.checks import match
from fedfm.core.client import Client, ClientId, Update
from fedfm.core.federation import Federation
from fedfm.linalg.params import Layout, Params
from fedfm.linalg.running_mean import RunningMean


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
        mean = RunningMean()
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
