"""Test a client-level epsilon by the noise in the run's own releases, and by the norms of its own updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

from fedfm.aggregation.private import CentralGaussian
from fedfm.audits.audit import Audit
from fedfm.audits.finding import CLAIM, Finding, absorb_rounding, refutes
from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.vectors import vector
from fedfm.audits.recorded_run import Turn
from fedfm.audits.replay import Replay
from fedfm.audits.row_evidence import no_round
from fedfm.audits.stated_epsilon import finding_on_claim
from fedfm.core.client import Update
from fedfm.linalg.params import Params
from fedfm.privacy import gaussian
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

QUESTION = "Do the models disclose more about single clients than the stated epsilon allows?"
METHODS = ("fedavg", "fedprox")  # methods whose model moves by the mean of the updates
CONFIDENCE = 0.999  # confidence of each of the two refutations; it is high because audits are repeated


class ClientEpsilon(Audit):
    """The attacker knows every update. In each round it computes the noise: the model's step minus the updates' sum.

    Suppose that the noise is normal with standard deviation sigma. Then a client with updates u_t is hidden by mu-GDP
    with mu^2 = sum_t (|u_t| / sigma)^2 (Dong, Roth, Su 2022). The client with the largest norm has the largest mu.
    Computed with the upper end of sigma's interval, it refutes every epsilon that is smaller. The audit also tests
    whether two rounds share their noise, which would cancel in their difference.
    """

    replies: ClassVar[bool] = False

    def reads(self, run: Run) -> bool:
        mechanism = run.experiment.aggregation.mechanism
        return run.experiment.method_name in METHODS and isinstance(mechanism, CentralGaussian)

    def unfit(self, run: Run) -> str | None:
        mechanism = mechanism_of(run)
        if (why := why_not_measured(mechanism)) is not None:
            return why
        if mechanism.hidden:
            return "secure aggregation draws new masks in a replay, and the updates of this run are not seen"
        return no_round(run)

    def watch(self, run: Run) -> _Residuals:
        return _Residuals(run.experiment.method.params_for)

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        from scipy.stats import chi2, norm

        found = replay.watch(_Residuals)
        result, delta = replay.run.manifest["result"], mechanism_of(replay.run).delta
        stated = float(result["epsilon"])
        sigma = math.sqrt(found.squares / found.numbers)
        highest = math.sqrt(found.squares / chi2.ppf(1 - CONFIDENCE, found.numbers))
        longest = math.sqrt(max(found.lengths.values()))  # norm of all updates of a client together
        pairs = max(len(found.shared), 1)
        repeated = max(found.shared, default=0.0) > norm.isf((1 - CONFIDENCE) / 2 / pairs)
        low = math.inf if repeated else gaussian.epsilon_of(highest, longest, delta)
        estimate = math.inf if repeated else gaussian.epsilon_of(sigma, longest, delta)
        low = absorb_rounding(low, stated)
        says = (
            f"The noise on a sum has a standard deviation of {sigma:.4g}, and one client's updates have the norm "
            f"{longest:.4g} in {result['rounds']} rounds. If the noise is normal, this "
            f"{refutes(low, digits=4)} at {100 * CONFIDENCE:g} % confidence."
        )
        if repeated:
            says = "Two rounds share their noise: the difference of their models shows the updates."
        detail = {"noise": sigma, "noise_at_most": highest, "longest_update": found.longest, "numbers": found.numbers}
        detail |= {"confidence": CONFIDENCE, "delta": delta}
        return [finding_on_claim("client_epsilon", QUESTION, (estimate, low, None), stated, CLAIM, says, detail)]


def mechanism_of(run: Run) -> CentralGaussian:
    """The client-level mechanism of a run that has one."""
    return cast(CentralGaussian, run.experiment.aggregation.mechanism)


def why_not_measured(mechanism: CentralGaussian) -> str | None:
    """Why the noise of a client-level mechanism cannot be compared between rounds; None if it can."""
    if mechanism.fraction is None and mechanism.adaptive is None:
        return None
    return "it measures independent noise and a fixed clip, of runs in which the method chooses the cohorts"


class _Residuals:
    """The noise of each round: the number of asked clients times the model's step, minus the sum of the updates.

    Attributes:
        squares, numbers: sum of squares of the entries of the noise, and number of these entries.
        lengths: client -> sum over rounds of the squared norms of its updates.
        longest: largest norm of one update.
        shared: for each round, the cosine between its noise and that of the round before, times the square root of the
            number of entries. It is standard normal if the two are independent.
    """

    def __init__(self, params_for: Callable[[Any, str], Params]) -> None:
        self._params_for = params_for
        self.squares, self.numbers, self.longest = 0.0, 0, 0.0
        self.lengths: dict[str, float] = {}
        self.shared: list[float] = []
        self._last: Array | None = None

    def see(self, turn: Turn, population: Partitioned) -> None:
        if not turn.round:
            return
        after, before = (vector(self._params_for(state, "").values()) for state in (turn.after, turn.before))
        noise = (after - before) * len(turn.payloads)
        for reply in turn.replies:
            if isinstance(reply.value, Update):
                update = vector(reply.value.delta.values())
                noise -= update
                length = float(update @ update)
                self.lengths[reply.client] = self.lengths.get(reply.client, 0.0) + length
                self.longest = max(self.longest, math.sqrt(length))
        squares = float(noise @ noise)
        if self._last is not None and squares:
            cosine = float(noise @ self._last) / math.sqrt(squares * float(self._last @ self._last))
            self.shared.append(abs(cosine) * math.sqrt(len(noise)))
        self.squares, self.numbers, self._last = self.squares + squares, self.numbers + len(noise), noise
