"""Record-level differential privacy by DP-SGD at the clients, as the privacy mechanism of a mean.

The updates are already private when they leave the client, so the guarantee also holds against the server.
:mod:`fedfm.privacy.dp_sgd` states the guarantee; :mod:`fedfm.training.private` trains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fedfm.aggregation.base import Aggregator, Mechanism
from fedfm.core.client import Client, Update
from fedfm.errors import InputError
from fedfm.privacy.accountant import Accountant, Spent
from fedfm.privacy.composition import Releases
from fedfm.privacy.dp_sgd import DescentPlan


@dataclass(frozen=True)
class DpSgd(Mechanism):
    """DP-SGD at every client.

    Attributes:
        chosen: the plan that every client follows.
        batch_size: B of the client optimiser.
        steps: the client optimiser's number of steps in a round, as a function of the number of rows.
    """

    chosen: DescentPlan
    batch_size: int
    steps: Callable[[int], int]
    withholds: ClassVar[bool] = True

    @property
    def plan(self) -> DescentPlan:
        return self.chosen

    def bound(self, client: Client, update: Update) -> Update:
        """The update without metrics, which would disclose statistics of the rows."""
        return replace(update, metrics={})

    def one_round(self, rows: int) -> Releases:
        """The releases of a client with this number of rows in one round."""
        steps = self.steps(rows)
        return replace(self.plan.releases(max(rows, 1), self.batch_size, steps), times=steps)

    def spend(self, accountant: Accountant, rounds: int, rows: Sequence[int] | None = None) -> None:
        """Add the releases of the client with the largest epsilon to the accountant."""
        plan = self.plan
        if not rounds:
            return
        epsilon, z = plan.target_epsilon, plan.noise_multiplier
        if epsilon is None:
            if rows is None:
                raise InputError(
                    "privacy.noise_multiplier: epsilon depends on the silos' numbers of rows, which this server does "
                    "not know; set target_epsilon, by which each silo chooses its own noise",
                    key="privacy.noise_multiplier",
                )
            # Of all clients with the same number of steps, the client with the fewest rows draws each row most often.
            least = {self.steps(n): n for n in sorted(rows, reverse=True) if n}
            found = [plan.releases(n, self.batch_size, steps) for steps, n in least.items()]
            epsilon = max((plan.epsilon(releases) for releases in found), default=0.0)
        accountant.compose(
            Spent(
                mechanism="DP-SGD",
                unit="record",
                relation="add_remove",
                epsilon=epsilon,
                delta=plan.delta,
                sensitivity=plan.clip_norm,
                sigma=None,  # rows are sampled for each step, so no single Gaussian release spends this epsilon
                composition=f"{rounds} rounds of Poisson-sampled steps, composed by privacy loss distributions; the "
                "largest epsilon over clients, whose rows are disjoint",
                note="against the server, too; the numbers of rows are public; a person with rows at two clients "
                "spends what both spend together"
                + (
                    f"; the noise of a step's sum has the standard deviation {z * plan.clip_norm:.6g}"
                    if z
                    else "; each client chooses its own noise, from its number of rows and steps"
                ),
            )
        )


def under(aggregation: Aggregator, plan: DescentPlan, batch_size: int, steps: Callable[[int], int]) -> Aggregator:
    """The aggregation for clients that train by DP-SGD."""
    private: Aggregator = copy.copy(aggregation)
    object.__setattr__(private, "mechanism", DpSgd(plan, batch_size, steps))
    return private
