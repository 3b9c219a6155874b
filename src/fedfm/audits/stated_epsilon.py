"""The differential privacy that a run's manifest claims."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from fedfm.aggregation.base import secrets_of
from fedfm.audits.finding import VerdictRule
from fedfm.runtime.run_directory import Run


@dataclass(frozen=True)
class Claim:
    """Differential privacy as the ledger states it.

    Attributes:
        steps: neighbouring steps to exchange one row for another: 2 if neighbours differ by one row more or less.
    """

    epsilon: float
    delta: float
    steps: int

    @property
    def exchange_delta(self) -> float:
        """Delta of an exchange of two rows, with ``steps * epsilon``."""
        return min(self.delta * sum(math.exp(min(i * self.epsilon, 700.0)) for i in range(self.steps)), 1.0)


def claim(run: Run) -> Claim | None:
    """The guarantee against a server that sees every message, or None."""
    if "noise" in secrets_of(run.experiment.method, run.experiment.aggregation):
        return None  # the server itself adds the noise: the guarantee holds against readers of the model only
    ledger: dict[str, Any] = run.manifest["ledger"]
    stated = [v for v in (ledger.get("epsilon"), run.manifest["result"].get("epsilon")) if v is not None]
    if not stated:
        return None
    entries = [e for e in ledger.get("entries", []) if e.get("epsilon") is not None]
    privacy = run.experiment.privacy
    deltas = [float(e["delta"]) for e in entries if e.get("delta") is not None]
    if not deltas and privacy is not None and privacy.delta is not None:
        deltas = [privacy.delta]
    relations = {e.get("relation") for e in entries}
    exchange = relations and relations <= {"replace", "replace_any"}
    # The claim is the smallest epsilon that is stated.
    return Claim(min(map(float, stated)), max(deltas, default=1e-5), 1 if exchange else 2)


def limit_rule(rule: VerdictRule, allowed: float, strict: float, confidence: float) -> VerdictRule:
    """A rule that also knows a stated guarantee: more than it allows is a leak, however little that is.

    Args:
        allowed: the largest figure under the guarantee.
        strict: the low end of the figure's interval at ``confidence``.
    """
    low, most = f"low at {100 * confidence:g} %", "what epsilon allows"
    return replace(rule, leaks=(*rule.leaks, f"{low} > {most}")).with_numbers({low: strict, most: allowed})
