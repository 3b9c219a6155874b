"""Test a client-level epsilon: repeat the run with new noise, and with a known update (a canary) for each client."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np
import torch

from fedfm import seeds
from fedfm.aggregation.base import Aggregator
from fedfm.aggregation.private import CentralGaussian
from fedfm.audits.audit import Audit
from fedfm.audits.finding import Finding, refutes, twice
from fedfm.audits.inference import canaries
from fedfm.audits.inference.canaries import TOO_LONG
from fedfm.audits.inference.rates import Array
from fedfm.audits.inference.vectors import vector
from fedfm.audits.recorded_run import RecordedRun
from fedfm.audits.replay import Replay
from fedfm.audits.stated_epsilon import CONFIDENCE, STRICT, finding_on_claim, lower_bounds
from fedfm.core.client import Client, Update
from fedfm.core.new_folders import temporary_folder
from fedfm.linalg.params import Params
from fedfm.linalg.threads import torch_threads
from fedfm.runtime.run_directory import Run

QUESTION = "Do the means disclose more about single clients than the stated epsilon allows?"
STRANGERS = 1000  # number of canaries that are never sent
_MOST = 4e8  # largest number of entries of all canaries and all means together, which stay in memory


class Canaries(Audit):
    """Replaces each client's update by a canary, and looks for the canary in the means that the method gets.

    The noise is drawn anew. So the audit tests the implementation of the mechanism, with the run's numbers of clients,
    rounds and parameters.
    """

    replays: ClassVar[bool] = False
    takes: ClassVar[float] = 5.0

    def reads(self, run: Run) -> bool:
        return any(e.get("unit") == "client" and "sigma" in e for e in run.manifest["ledger"]["entries"])

    def why_unread(self, run: Run) -> str:
        return "the run has no noise at the level of clients"

    def unfit(self, run: Run) -> str | None:
        result, clients = run.manifest["result"], len(run.manifest["clients"])
        mechanism = cast(CentralGaussian, run.experiment.aggregation.mechanism)  # see reads
        if mechanism.fraction is not None or mechanism.adaptive is not None:
            return "it can only measure independent noise with a fixed clip norm, and cohorts that the method chooses"
        if not result["rounds"] or clients < 2:
            return "it needs at least one round and two clients"
        numbers = int(run.manifest["model"]["trainable"]) * (result["rounds"] + clients)
        return f"its directions would have {numbers:.1g} entries, more than {_MOST:.0g}" if numbers > _MOST else None

    def findings(self, replay: Replay, notice: Callable[[str], None], **options: Any) -> list[Finding]:
        experiment, result = replay.run.experiment, replay.run.manifest["result"]
        planted = Planted(experiment.aggregation, experiment.run.seed)
        with temporary_folder("fedfm-audit-") as private, torch_threads(1):
            again = RecordedRun(
                experiment.method,
                replay.population,
                private,
                seed=experiment.run.seed,
                aggregator=planted.aggregator,
            )
            for _ in again.turns(result["rounds"]):
                pass
        found, strangers = planted.scores(STRANGERS)
        entries = replay.run.manifest["ledger"]["entries"]
        delta = max(float(e["delta"]) for e in entries if e.get("unit") == "client")
        return [finding(found, strangers, planted.dim, delta, float(result["epsilon"] or math.inf))]


def finding(found: Array, strangers: Array, dim: int, delta: float, stated: float) -> Finding:
    """The finding on a stated epsilon, from the scores of canaries and of strangers (canaries that were not sent).

    The size of the noise is estimated from ``dim`` entries.
    """
    low, strict = lower_bounds(lambda level: canaries.epsilon_bound(found, dim, delta, level), stated)
    # If one client has more weight than the others, the mean of the scores underestimates its epsilon.
    estimate = max(canaries.epsilon_at(float(found.mean()), delta), low)
    high = max(canaries.epsilon_most(found, dim, delta, CONFIDENCE), estimate)
    counted = canaries.counted_bound(found, strangers, delta, CONFIDENCE)
    says = (
        f"A client's update stands out from the noise by {float(found.mean()):.3g} standard deviations (mean of "
        f"{len(found)} canaries). If the noise is normal, this {refutes(low)} at 95 % "
        f"confidence; without that assumption it {refutes(counted)}."
    )
    detail = {"canaries": len(found), "strangers": len(strangers), "delta": delta, "low_by_counts": counted}
    rule = twice(strict, STRICT)
    of_claim = finding_on_claim("canaries", QUESTION, (estimate, low, high), stated, rule, says, detail)
    if of_claim.verdict == "holds" and estimate > stated:
        why = (
            f" The estimate, {estimate:.3g}, is above the claim but does not contradict it: with {len(found)} canaries "
            f"its interval is {low:.3g} to {high:.3g}, and only the low end counts."
        )
        return replace(of_claim, says=of_claim.says + why)
    return of_claim


class Planted:
    """An aggregation in which each client sends its canary instead of its update. It records the released means.

    Attributes:
        aggregator: the changed copy of the run's aggregator.
        dim: number of entries of an update.
    """

    def __init__(self, aggregator: Aggregator, seed: int) -> None:
        self._real, self._seed = aggregator, seed
        self._clip = float(aggregator.mechanism.clip_norm)  # type: ignore[attr-defined]
        self._residuals: list[Array] = []
        self._signs: list[dict[str, int]] = []
        self.dim = 0
        self._directions: dict[str, Array] = {}
        self._count: dict[str, int] = {}
        self.aggregator: Any = copy.copy(aggregator)
        object.__setattr__(self.aggregator, "protect", self._protect)
        object.__setattr__(self.aggregator, "mean", self._mean)

    def scores(self, strangers: int) -> tuple[Array, Array]:
        """Scores of the canaries that were sent most often, and of ``strangers`` directions that were never sent."""
        names = sorted(self._directions)
        signs = np.array([[sent.get(name, 0) for sent in self._signs] for name in names], dtype=np.float64)
        often = (signs != 0).sum(1)
        keep = np.flatnonzero(often == often.max())
        residuals = np.stack(self._residuals)
        found = canaries.scores(residuals, signs[keep], [self._directions[names[i]] for i in keep], self._clip)
        own = signs[keep[0]] @ residuals
        size = float(np.linalg.norm(own)) / math.sqrt(self.dim)
        drawn = (float(own @ self._direction(f"stranger {i}")) for i in range(strangers))
        return found, np.array([x / size if size else 0.0 for x in drawn])

    def _protect(self, client: Client, update: Update) -> Any:
        layout, at = update.delta, 0
        self.dim = sum(x.numel() for x in layout.values() if x.is_floating_point())
        u = self._directions.setdefault(client.id, self._direction(client.id))
        # The signs are plus, minus, minus, plus, and so on, so that after an even number of releases half are plus.
        n = self._count[client.id] = self._count.get(client.id, 0) + 1
        self._signs[-1][client.id] = sign = 1 if n % 4 in (0, 1) else -1
        sent = {}
        for name, x in layout.items():
            if x.is_floating_point():
                part = u[at : at + x.numel()].reshape(x.shape)
                sent[name], at = torch.from_numpy(TOO_LONG * self._clip * sign * part).to(x.dtype), at + x.numel()
            else:
                sent[name] = torch.zeros_like(x)
        return self._real.protect(client, Update(Params(sent), update.weight, update.metrics))

    def _mean(self, fed: Any, handler: Any, of: Any, payload: Any, like: Any) -> Params:
        asked = len(fed.clients if of is None else (of := tuple(of)))
        self._signs.append({})
        mean = type(self._real).mean(self.aggregator, fed, handler, of, payload, like)
        total = asked * vector(mean.values())
        for name, sign in self._signs[-1].items():
            total -= self._clip * sign * self._directions[name]
        self._residuals.append(total)
        return mean

    def _direction(self, name: str) -> Array:
        drawn = seeds.generator(self._seed, "audit", "canary", name).standard_normal(self.dim)
        return np.asarray(drawn / np.linalg.norm(drawn))
