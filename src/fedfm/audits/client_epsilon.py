"""Test of a client-level epsilon: the noise in the run's own releases, and the norms of its own updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

from fedfm.aggregation.private import CentralGaussian
from fedfm.audits.audit import Audit
from fedfm.audits.finding import CLAIM, Finding, absorb_rounding, refutes
from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.vectors import vector
from fedfm.audits.replay import Replay, Turn
from fedfm.audits.row_evidence import no_round
from fedfm.audits.stated_epsilon import finding_on_claim
from fedfm.core.client import Update
from fedfm.linalg.params import Params
from fedfm.privacy import gaussian
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.run_directory import Run

QUESTION = "Do the models disclose more about single clients than the stated epsilon allows?"
METHODS = ("fedavg", "fedprox")  # their model moves by the mean
CONFIDENCE = 0.999  # of each of the two refutations; audits are repeated


class ClientEpsilon(Audit):
    """The attacker knows every update. It measures the noise between their sum and the model's step in each round.

    If the noise is normal, a client of whom everything else is known is hidden by mu-GDP with mu^2 = sum_t (|u_t| /
    sigma)^2 (Dong, Roth, Su 2022): the longest client's mu, at the upper end of sigma's interval, refutes every smaller
    epsilon. Noise that two rounds share cancels in their difference.
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
    """The noise of each round: asked times the step of the model, less the sum of the updates.

    Attributes:
        squares, numbers: sum of squares of the noise, and how many numbers.
        lengths: of each client the sum over rounds of its updates' squared norms.
        longest: largest norm of one update.
        shared: of each round the cosine of its noise with the noise of the round before, times the root of the number
            of entries: standard normal if they are independent.
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
