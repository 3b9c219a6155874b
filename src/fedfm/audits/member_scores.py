"""Make the findings of all membership attacks, from scores of rows that were trained on and of rows that were not.

Attacks differ in what the attacker sees (mixtures, the final model, an expert, updates) and in how it scores a row.
This module computes the same figures for all: the area under the ROC curve (AUC) with its interval, the largest AUC
that a stated epsilon allows, and the rate of true positives at a low rate of false positives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedfm.audits.finding import ABOVE, Finding, VerdictRule, interval
from fedfm.audits.inference import rates
from fedfm.audits.inference.rates import ALARMS, NOTABLE, NOTABLE_TPR, Array, Rate
from fedfm.audits.stated_epsilon import STRICT, Claim, limit_rule

Detail = Mapping[str, Any]


class CellScores(NamedTuple):
    """Scores of one client, or of one class of a client; a higher score means "trained on"."""

    members: Array
    strangers: Array  # scores of similar rows that nobody trained on


class MemberScores:
    """The scores of an attack.

    Args:
        generator: makes the bootstrap's random generator for a given confidence.
        strangers: number of different strangers in all cells, since cells may share some; None if they share none.
        digits: number of decimal places to which the normal quantile is rounded; if None, it is not rounded.

    Attributes:
        aucs: the AUC of each cell.
        sizes: the number of members of each cell.
    """

    def __init__(
        self,
        cells: Sequence[CellScores],
        generator: Callable[[float], np.random.Generator],
        strangers: int | None = None,
        digits: int | None = None,
    ) -> None:
        self.cells, self._generator, self._digits = cells, generator, digits
        self.aucs = np.array([rates.auc(*cell) for cell in cells])
        self.sizes = np.array([len(cell.members) for cell in cells])
        self.strangers = sum(len(cell.strangers) for cell in cells) if strangers is None else strangers

    def of_clients(self) -> dict[str, Any]:
        """Numbers for the detail of a finding if the cells are clients."""
        return {"clients": len(self.cells), "members": int(self.sizes.sum()), "strangers": self.strangers}

    def interval(self, confidence: float, index: Array | slice = slice(None)) -> tuple[float, float, float]:
        """Mean AUC over cells, and the low and high end of its interval; ``index`` selects cells."""
        from scipy.stats import norm

        z = float(norm.ppf((1 + confidence) / 2))
        z = z if self._digits is None else round(z, self._digits)
        rng = self._generator(confidence)
        return rates.auc_interval(self.aucs[index], self.sizes[index], self.strangers, rng, confidence, z)

    def rate(self, rng: np.random.Generator) -> Rate | None:
        """Rate of true positives at 1 % false positives; None if every cell has too few strangers."""
        return rates.tpr_at(self.cells, ALARMS, rng)

    def finding(
        self,
        name: str,
        question: str,
        says: str,
        detail: Detail,
        claim: Claim | None = None,
        *,
        rule: VerdictRule = ABOVE,
        strict: float = STRICT,
        more: str = "",
        unit: str = "",
    ) -> Finding:
        """The finding about the AUC.

        Args:
            says: start of the answer, e.g. "A training row scores above a test row"; the AUC follows.
            claim: a guarantee that bounds the AUC. Only an interval at the confidence ``strict`` can contradict it.
            more: text after the interval.
            unit: text at the end that says what a row is.
        """
        mean, low, high = self.interval(0.95)
        says += f" with chance {mean:.3f} {interval(low, high)}{more}; 0.5 is guessing"
        contradicts = False
        if claim is not None:
            allowed, surely = claim.largest_auc, self.interval(strict)[1]
            contradicts, rule = surely > allowed, limit_rule(rule, allowed, surely, strict)
            detail = {**detail, "allowed_by_epsilon": allowed}
            says += f", and epsilon = {claim.epsilon:.4g} allows {allowed:.3f}"
        return Finding(name, question, mean, low, high, NOTABLE, rule, f"{says}.{unit}", contradicts, detail)


def finding_on_rate(
    name: str, question: str, rate: Rate, detail: Detail, by: str = "", strangers: str = "strangers", unit: str = ""
) -> Finding:
    """The finding about the rate of true positives.

    Args:
        by: the attack, in words.
        strangers: the rows that nobody trained on, in words.
        unit: text at the end that says what a row is.
    """
    says = f"{f'By {by}, ' if by else ''}{100 * rate.tpr:.1f} % of the training rows "
    says += f"[{100 * rate.low:.1f}, {100 * rate.high:.1f}] are above a threshold that "
    says += f"{100 * rate.alarms / rate.negatives:.1f} % of {strangers} exceed; guessing gives 1 %, the bound is "
    says += f"{100 * NOTABLE_TPR:.0f} %.{unit}"
    return Finding(name, question, rate.tpr, rate.low, rate.high, NOTABLE_TPR, ABOVE, says, False, detail)
