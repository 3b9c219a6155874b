"""The findings of every membership attack: scores of rows that were trained on, against scores of rows that were not.

An attack has a surface, which is what the attacker sees: mixtures, the final model, an expert, updates. It scores each
row from that. The rest is the same for all: the area under the ROC curve with its interval, what a stated epsilon
allows, and the true positives at few false ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fedfm.audits.finding import ABOVE, Finding, VerdictRule, interval
from fedfm.audits.inference import rates
from fedfm.audits.inference.rates import ALARMS, NOTABLE, NOTABLE_TPR, Array, Rate
from fedfm.audits.stated_epsilon import STRICT, Claim, limit_rule


class Cell(NamedTuple):
    """Scores that can be compared with each other: of one client, or of one client's class.

    Attributes:
        members: (n,) of rows that were trained on; more says "trained on".
        strangers: (m,) of similar rows that nobody trained on.
    """

    members: Array
    strangers: Array


@dataclass(frozen=True)
class MemberScores:
    """The scores of an attack.

    Attributes:
        strangers: different rows of all cells that nobody trained on.
        generator: of the bootstrap at a confidence.
        digits: of the normal quantile behind the point; None: all of them.
    """

    cells: Sequence[Cell]
    strangers: int
    generator: Callable[[float], np.random.Generator]
    digits: int | None = 6

    @classmethod
    def of_clients(
        cls, cells: Sequence[Cell], generator: Callable[[float], np.random.Generator], digits: int | None = 6
    ) -> MemberScores:
        """Scores of clients, each of which has strangers of its own."""
        return cls(cells, sum(len(cell.strangers) for cell in cells), generator, digits)

    @cached_property
    def aucs(self) -> Array:
        """AUC of each cell."""
        return np.array([rates.auc(*cell) for cell in self.cells])

    @cached_property
    def sizes(self) -> Array:
        """Members of each cell."""
        return np.array([len(cell.members) for cell in self.cells])

    def counts(self) -> dict[str, Any]:
        """For the detail of a finding whose cells are clients."""
        return {"clients": len(self.cells), "members": int(self.sizes.sum()), "strangers": self.strangers}

    def interval(self, confidence: float, index: Array | slice = slice(None)) -> tuple[float, float, float]:
        """(mean AUC over cells, low, high); ``index`` selects cells."""
        from scipy.stats import norm

        z = float(norm.ppf((1 + confidence) / 2))
        z = z if self.digits is None else round(z, self.digits)
        rng = self.generator(confidence)
        return rates.auc_interval(self.aucs[index], self.sizes[index], self.strangers, rng, confidence, z)

    def rate(self, rng: np.random.Generator) -> Rate | None:
        """True positives at 1 % of false ones; None if every cell has too few strangers."""
        return rates.tpr_at(self.cells, ALARMS, rng)

    def finding(
        self,
        name: str,
        question: str,
        says: str,
        detail: Mapping[str, Any],
        *,
        rule: VerdictRule = ABOVE,
        claim: Claim | None = None,
        strict: float = STRICT,
        more: str = "",
        unit: str = "",
    ) -> Finding:
        """The finding on the AUC.

        Args:
            says: what has which chance, as the start of the answer.
            claim: a guarantee that bounds the AUC.
            strict: confidence at which the guarantee is contradicted.
            more: after the interval.
            unit: what a row is, as the end of the answer.
        """
        mean, low, high = self.interval(0.95)
        says += f" with chance {mean:.3f} {interval(low, high)}{more}; 0.5 is guessing"
        contradicts, figures = False, dict(detail)
        if claim is not None:
            allowed, surely = claim.largest_auc, self.interval(strict)[1]
            contradicts, rule = surely > allowed, limit_rule(rule, allowed, surely, strict)
            figures["allowed_by_epsilon"] = allowed
            says += f", and epsilon = {claim.epsilon:.4g} allows {allowed:.3f}"
        return Finding(name, question, mean, low, high, NOTABLE, rule, f"{says}.{unit}", contradicts, figures)


def finding_on_rate(
    name: str,
    question: str,
    rate: Rate,
    detail: Mapping[str, Any],
    *,
    by: str = "",
    strangers: str = "strangers",
    unit: str = "",
) -> Finding:
    """The finding on the true positives at few false ones.

    Args:
        by: the attack in words.
        strangers: what the threshold is set by.
        unit: what a row is, as the end of the answer.
    """
    says = f"{100 * rate.tpr:.1f} % of the training rows [{100 * rate.low:.1f}, {100 * rate.high:.1f}] are above a "
    says += f"threshold that {100 * rate.alarms / rate.negatives:.1f} % of {strangers} exceed; guessing gives 1 %, the "
    says += f"bound is {100 * NOTABLE_TPR:.0f} %.{unit}"
    says = f"By {by}, {says}" if by else says
    return Finding(name, question, rate.tpr, rate.low, rate.high, NOTABLE_TPR, ABOVE, says, False, detail)
