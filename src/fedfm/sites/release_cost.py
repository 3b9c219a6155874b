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
from fedfm.privacy.composition import epsilon_of
from fedfm.sites.ledger import NOTHING, UNBOUNDED, Cost

_AT_SILOS = ("distributed_gaussian", "dp_sgd")  # mechanisms whose noise the silos add
_ALMOST = 1 - 1e-6  # tolerance for rounding errors in the comparison of two epsilons


class ReleaseCosts:
    """The costs of a silo's answers in one run.

    Attributes:
        mechanism: "own" if the method has its own mechanism and the silo adds the noise, "gaussian" if the server adds
            it; else the mechanism's name in [privacy]; "" if nothing bounds the cost of a release.
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
        answers = max(len(method.means), 1)
        concentrated = mechanism_name == "distributed_gaussian"
        if isinstance(method, Private) and own.events:
            by = method.noise_by
            mechanism_name = "gaussian" if by == "server" else mechanism_name if concentrated else "own"
            release = mine = _cost(own, by, concentrated)
        else:  # the mechanism states the cost of a round, in which the silo sends one answer for each mean
            by, mine = "silo" if mechanism_name in _AT_SILOS else "server", None
            release = _cost(shared, by, concentrated, answers)
        if isinstance(mechanism, DpSgd):
            one = mechanism.one_round(mechanism.batch_size if rows is None else rows)
            release = Cost("record", "add_remove", one.noise_multiplier, one.rate, one.times, "silo")
        # DP-SGD states the cost of a round, whose passes over the rows its answers share.
        times = 1 if mine else method.rounds * (1 if isinstance(mechanism, DpSgd) else answers)
        if isinstance(mechanism, CorrelatedGaussian) and release is not None:  # shared noise: one answer costs more
            release = replace(release, noise_multiplier=mechanism.noise_of_one_answer)
            times = -(-times // mechanism.period)
        self.mechanism, self.release = mechanism_name if release else "", release or UNBOUNDED
        # Under DP-SGD a client half reads training rows by its optimiser alone, so each of its answers is covered.
        self._asks, self._times = mine is not None or isinstance(mechanism, DpSgd), times
        self._hidden = isinstance(experiment.aggregation, Secure)

    def of(self, handler: str) -> Cost:
        """Return the cost of an answer of this handler; an answer that [privacy] does not cover has no bound."""
        kind = handler.partition(".")[0]
        if kind == "train" or (kind == "query" and self._asks):
            return self.release
        return NOTHING if kind == "aggregate" and self._hidden else UNBOUNDED

    def epsilon(self, delta: float) -> float:
        """Return the epsilon of the complete experiment."""
        return epsilon_of([self.release.releases(self._times)], delta)


def _cost(accountant: Accountant, by: str, concentrated: bool, answers: int = 1) -> Cost | None:
    """The cost of one answer; None if it is not a Gaussian release, or if the accountant has a larger epsilon."""
    if not accountant.events:
        return None
    spent = together(accountant.events)
    if spent.sigma is None:
        return None
    cost = Cost(spent.unit, spent.relation, spent.sigma / spent.sensitivity, by=by, concentrated=concentrated)
    stated = max(spent.epsilon, accountant.epsilon or 0.0)  # for one release, the accountant's epsilon may be larger
    if epsilon_of([cost.releases()], spent.delta) < stated * _ALMOST:
        return None
    return replace(cost, noise_multiplier=cost.noise_multiplier * math.sqrt(answers))
