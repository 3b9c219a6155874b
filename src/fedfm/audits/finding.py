"""Findings of an audit of one run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fedfm.core.text import finite

Verdict = Literal["holds", "leaks", "inconclusive"]


@dataclass(frozen=True)
class Finding:
    """One question about a run, and its answer.

    Attributes:
        name: unique in an audit.
        question: as a user would ask it.
        estimate: the figure; None if the run is too small for one.
        low, high: its interval, at 95 % unless ``says`` names another level.
        bound: the reference of the figure: chance, or the run's promise.
        verdict: ``leaks``: an attacker learns something; ``holds``: it does not, or no more than is promised;
            ``inconclusive``: the run is too small, or promises nothing about the question.
        says: the answer in a sentence.
        contradicts: the measurement refutes a claim of the manifest.
        detail: further figures, plain values only.
    """

    name: str
    question: str
    estimate: float | None
    low: float | None
    high: float | None
    bound: float | None
    verdict: Verdict
    says: str
    contradicts: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; numbers that are not finite become null."""
        return {key: finite(value) for key, value in asdict(self).items()}


def nothing(name: str, question: str, why: str) -> Finding:
    """The finding of a run that cannot answer the question."""
    return Finding(name, question, None, None, None, None, "inconclusive", why)


def against(stated: float, low: float, strict: float) -> tuple[Verdict, str]:
    """(verdict, end of a sentence) on a stated epsilon by what a measurement refutes at 95 % and at a strict level.

    Audits are repeated, and at 95 % one in twenty refutes a true claim. So only the strict level contradicts the run.

    Example:
        >>> against(8.0, 5.0, 3.0), against(8.0, 9.0, 6.0)[0], against(8.0, 20.0, 12.0)[0]
        (('holds', '.'), 'inconclusive', 'leaks')
    """
    claimed = stated * (1 + 1e-6)
    if strict > claimed:
        return "leaks", ": it does not hold."
    if low > claimed:
        return "inconclusive", ", which is less; of true claims one audit in twenty says so: audit the run again."
    return "holds", "."


def above(low: float, high: float, line: float) -> Verdict:
    """``leaks`` if the interval lies above the line, ``holds`` if it lies below."""
    return "leaks" if low > line else "holds" if high <= line else "inconclusive"


def lines(findings: Sequence[Finding]) -> str:
    """A table for the terminal, and a sentence for each finding."""
    head = ("finding", "verdict", "estimate", "interval", "line")
    rows = [head, *((f.name, *cells(f.to_dict())) for f in findings)]
    widths = [max(len(row[j]) for row in rows) for j in range(len(head))]
    out = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for f in findings:
        says = f.says.replace(" %", "\N{NO-BREAK SPACE}%")
        out += ["", f.question, *textwrap.wrap(says, 110, initial_indent="  ", subsequent_indent="  ")]
        out += ["  This refutes a claim of the run."] if f.contradicts else []
    return "\n".join(out)


def cells(finding: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Verdict, estimate, interval and line of a finding's dict, as text."""
    low, high = finding.get("low"), finding.get("high")
    interval = "" if low is None and high is None else f"{_number(low) or '..'} to {_number(high) or '..'}"
    return str(finding.get("verdict")), _number(finding.get("estimate")), interval, _number(finding.get("bound"))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
