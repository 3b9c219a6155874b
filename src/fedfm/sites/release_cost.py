"""The privacy cost of one release. A silo computes it from the experiment's [privacy], never from server messages."""

from __future__ import annotations

import math
from dataclasses import replace

from fedfm.aggregation._record_level import DpSgd
from fedfm.aggregation.private import CorrelatedGaussian
from fedfm.aggregation.secure import Secure
from fedfm.config.experiment import Experiment
from fedfm.core.capabilities import Private
from fedfm.privacy.accountant import Accountant, together
from fedfm.privacy.composition import Releases, epsilon_of
from fedfm.sites.ledger import NOTHING, UNBOUNDED, Cost

_AT_SILOS = ("distributed_gaussian", "dp_sgd")  # mechanisms whose noise the silos add
_ALMOST = 1 - 1e-6  # tolerance for rounding errors in the comparison of two epsilons


class ReleaseCosts:
    """The costs of a silo's answers in one run.

    Attributes:
        mechanism: "own" if the method has its own mechanism and the silo adds the noise; else the mechanism's name
            in [privacy]; "" if nothing bounds the cost of a release.
        release: the cost of an answer that [privacy] covers.

    Args:
        rows: number of training rows of the silo, on which the noise of DP-SGD depends; None if the rows are not read
            yet.
    """

    def __init__(self, experiment: Experiment, rows: int | None = None) -> None:
        own, shared, method = Accountant(), Accountant(), experiment.method
        if isinstance(method, Private):
            method.spend(own)
        mechanism = experiment.aggregation.mechanism
        mechanism.spend(shared, 1)
        mechanism_name = experiment.privacy.mechanism or "gaussian" if experiment.privacy is not None else ""
        if (mine := _cost(own, "server" if method.means else "silo")) is not None:
            mechanism_name = "own" if mine.by == "silo" else "gaussian"
        # The mechanism states the cost of a round, in which the silo sends one answer for each mean.
        release = mine or _cost(shared, "silo" if mechanism_name in _AT_SILOS else "server", max(len(method.means), 1))
        if isinstance(mechanism, DpSgd):
            one = mechanism.one_round(mechanism.batch_size if rows is None else rows)
            release = Cost("record", "add_remove", one.noise_multiplier, one.rate, one.times, "silo")
        times = 1 if mine else method.rounds
        if isinstance(mechanism, CorrelatedGaussian) and release is not None:  # shared noise: one answer costs more
            release = replace(release, noise_multiplier=mechanism.noise_of_one_answer)
            times = -(-times // mechanism.period)
        self.mechanism, self.release = mechanism_name if release else "", release or UNBOUNDED
        self._asks, self._times = mine is not None, times
        self._hidden = isinstance(experiment.aggregation, Secure)

    def of(self, handler: str) -> Cost:
        """Return the cost of an answer of this handler; an answer that [privacy] does not cover has no bound."""
        kind = handler.partition(".")[0]
        if kind == "train" or (kind == "query" and self._asks):
            return self.release
        return NOTHING if kind == "aggregate" and self._hidden else UNBOUNDED

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the complete experiment."""
        one = self.release
        return epsilon_of([Releases(one.noise_multiplier, one.times * self._times, one.rate)], delta)


def _cost(accountant: Accountant, by: str, answers: int = 1) -> Cost | None:
    if not accountant.events:
        return None
    spent = together(accountant.events)
    if spent.sigma is None:
        return None
    z = spent.sigma / spent.sensitivity
    if epsilon_of([Releases(z)], spent.delta) < spent.epsilon * _ALMOST:
        return None  # not a single Gaussian release, so its parts cannot be composed as Gaussians
    return Cost(spent.unit, spent.relation, z * math.sqrt(answers), by=by)
