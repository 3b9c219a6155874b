"""Read the differential privacy that a run's manifest claims, and make the findings on this claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedfm.aggregation.base import secrets_of
from fedfm.audits.finding import Finding, VerdictRule, absorb_rounding, against
from fedfm.audits.inference import one_run
from fedfm.runtime.run_directory import Run

CONFIDENCE = 0.95
STRICT = 0.9999  # confidence that is needed to contradict a claim; high, because audits are repeated
Figures = tuple[float, float, float | None]


@dataclass(frozen=True)
class Claim:
    """Differential privacy as the ledger states it.

    Attributes:
        steps: number of steps between neighbouring data sets that exchange one row for another. It is 2 if neighbours
            differ by an added or removed row (remove one, then add the other), otherwise 1.
    """

    epsilon: float
    delta: float
    steps: int

    @property
    def largest_auc(self) -> float:
        """The largest AUC that the claim allows for a membership attack between two exchanged rows."""
        return one_run.largest_auc(*one_run.of_steps(self.epsilon, self.delta, self.steps))


def claim(run: Run) -> Claim | None:
    """The guarantee against a server that sees every message; None if the run states no such guarantee."""
    if "noise" in secrets_of(run.experiment.method, run.experiment.aggregation):
        return None  # the server adds the noise, so the guarantee holds only against readers of the model
    ledger: dict[str, Any] = run.manifest["ledger"]
    stated = [v for v in (ledger.get("epsilon"), run.manifest["result"].get("epsilon")) if v is not None]
    if not stated:
        return None
    entries = [e for e in ledger.get("entries", []) if e.get("epsilon") is not None]
    privacy = run.experiment.privacy
    deltas = _deltas(entries)
    if not deltas and privacy is not None and privacy.delta is not None:
        deltas = [privacy.delta]
    relations = {e.get("relation") for e in entries}
    exchange = relations and relations <= {"replace", "replace_any"}
    # If several epsilons are stated, the smallest one is the claim.
    return Claim(min(map(float, stated)), max(deltas, default=1e-5), 1 if exchange else 2)


def claim_of_model(run: Run) -> Claim | None:
    """The guarantee, for rows or clients, against a reader of the model; None if the run states no such guarantee."""
    epsilon, deltas = run.manifest["result"].get("epsilon"), _deltas(run.manifest["ledger"]["entries"])
    return None if epsilon is None or not deltas else Claim(float(epsilon), max(deltas), 2)


def _deltas(entries: list[dict[str, Any]]) -> list[float]:
    return [float(e["delta"]) for e in entries if e.get("delta") is not None]


def limit_rule(rule: VerdictRule, allowed: float, strict: float, confidence: float) -> VerdictRule:
    """Add a stated guarantee to a rule: a figure above the guarantee's limit is a leak, even if it is small.

    Args:
        allowed: the largest figure that the guarantee allows.
        strict: the low end of the figure's interval at the confidence ``confidence``.
    """
    low, most = f"low at {100 * confidence:g} %", "what epsilon allows"
    return replace(rule, leaks=(*rule.leaks, f"{low} > {most}")).with_numbers({low: strict, most: allowed})


def lower_bounds(bound_at: Callable[[float], float], stated: float) -> tuple[float, float]:
    """Lower bounds on epsilon at :data:`CONFIDENCE` and at :data:`STRICT`; rounding errors are absorbed."""
    low, strict = (absorb_rounding(bound_at(level), stated) for level in (CONFIDENCE, STRICT))
    return low, strict


def finding_on_claim(
    name: str, question: str, figures: Figures, stated: float, rule: VerdictRule, says: str, detail: Mapping[str, Any]
) -> Finding:
    """The finding on an epsilon that is stated for rows or for clients.

    Args:
        figures: estimate, lower bound, and upper bound (or None).
        rule: a rule of :mod:`fedfm.audits.finding` whose verdict ``leaks`` contradicts the run. It is ``CLAIM`` if the
            confidence of the lower bound is high enough for that, otherwise the rule that ``twice`` returns.
        says: start of the answer, which says what the attacker measured.
    """
    estimate, low, high = figures
    verdict = rule.verdict({"low": low, "bound": stated})
    says += f" The manifest claims {stated:.4g}{against(verdict)}"
    return Finding(name, question, estimate, low, high, stated, rule, says, verdict == "leaks", detail)
