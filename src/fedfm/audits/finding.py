"""Finding: what an audit found out about one run."""

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
        estimate: the figure; None where the run has too little to say.
        low, high: its interval, at 95 % where the sentence does not say otherwise.
        bound: what the figure is held against: chance, or what the run promises.
        verdict: ``leaks``: an attacker learns something; ``holds``: it does not, or no more than is promised;
            ``inconclusive``: the run is too small to tell, or the matter lies outside of what it promises.
        says: the answer in a sentence.
        contradicts: the measurement refutes what the manifest claims.
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
        """As it is written: what is not a finite number is null."""
        return {key: finite(value) for key, value in asdict(self).items()}


def nothing(name: str, question: str, why: str) -> Finding:
    """The finding of a run that has too little to say."""
    return Finding(name, question, None, None, None, None, "inconclusive", why)


def lines(findings: Sequence[Finding]) -> str:
    """A table for the terminal, and a sentence for each finding."""
    head = ("finding", "verdict", "estimate", "interval", "line")
    rows = [head, *((f.name, *cells(f.to_dict())) for f in findings)]
    widths = [max(len(row[j]) for row in rows) for j in range(len(head))]
    table = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    said = []
    for f in findings:
        said += [
            "",
            f.question,
            *textwrap.wrap(
                f.says.replace(" %", "\N{NO-BREAK SPACE}%"), 110, initial_indent="  ", subsequent_indent="  "
            ),
        ]
        if f.contradicts:
            said.append("  This refutes what the run claims.")
    return "\n".join([*table, *said])


def cells(finding: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Verdict, estimate, interval and line of a finding as it is written, as text."""
    low, high = finding.get("low"), finding.get("high")
    interval = "" if low is None and high is None else f"{_number(low) or '..'} to {_number(high) or '..'}"
    return str(finding.get("verdict")), _number(finding.get("estimate")), interval, _number(finding.get("bound"))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
