"""Findings of an audit of one run, and the rules that turn their numbers into verdicts."""

from __future__ import annotations

import math
import operator
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedfm.core.text import finite

Verdict = Literal["holds", "leaks", "inconclusive"]
_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_COMPARISON = re.compile(r"(.+?) (<=|>=|<|>) (.+)")
_DIGITS = range(4, 18)  # numbers of digits to try, until two printed numbers show which one is larger


@dataclass(frozen=True)
class VerdictRule:
    """The rule by which the numbers of a finding decide its verdict.

    A comparison is a text such as ``"low > bound"``. Each side is a number, a key of ``numbers``, or one of
    ``estimate``, ``low``, ``high`` and ``bound`` of the finding. A comparison with an unknown side counts as false.

    Attributes:
        leaks: comparisons that are checked first. If one of them is true, the verdict is ``leaks``.
        holds: comparisons that are checked next. If all of them are true, the verdict is ``holds``; an empty list never
            gives this verdict.
        otherwise: the reason for the verdict ``inconclusive``, which is given in all other cases.
        numbers: further numbers that comparisons may name.

    Raises:
        ValueError: a text is not a comparison.

    Example:
        >>> ABOVE.words({"low": 0.5, "high": 0.53, "bound": 0.55})
        'leaks if low > bound (0.5 > 0.55: no); else holds if high <= bound (0.53 <= 0.55: yes); else inconclusive'
    """

    leaks: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    otherwise: str = ""
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in (*self.leaks, *self.holds):
            if _COMPARISON.fullmatch(text) is None:
                raise ValueError(f'"{text}" is not a comparison; expected e.g. "low > bound"')

    def with_numbers(self, numbers: Mapping[str, float | None]) -> VerdictRule:
        """The rule with further numbers."""
        return replace(self, numbers={**self.numbers, **numbers})

    def if_complete(self, gaps: Sequence[str]) -> VerdictRule:
        """The rule for figures of a log: if lines of it are missing (``gaps`` says which), nothing holds."""
        return replace(self, holds=(), otherwise=gaps[0]) if gaps else self

    def verdict(self, numbers: Mapping[str, float | None]) -> Verdict:
        """The verdict for a finding with these values of ``estimate``, ``low``, ``high`` and ``bound``."""
        known = {**self.numbers, **numbers}
        if any(_true(text, known) for text in self.leaks):
            return "leaks"
        return "holds" if self.holds and all(_true(text, known) for text in self.holds) else "inconclusive"

    def words(self, numbers: Mapping[str, float | None]) -> str:
        """The rule in words, each comparison with its numbers and whether it is true."""
        known, parts = {**self.numbers, **numbers}, []
        for verdict, texts, glue in (("leaks", self.leaks, " or "), ("holds", self.holds, " and ")):
            if texts:
                parts.append(f"{verdict} if {glue.join(f'{text} ({_comparison_text(text, known)})' for text in texts)}")
        return "; else ".join([*parts, "inconclusive" + (f": {self.otherwise}" if self.otherwise else "")])


def _true(text: str, known: Mapping[str, float | None]) -> bool:
    left, sign, right = _sides(text, known)
    return left is not None and right is not None and bool(_SIGNS[sign](left, right))


def _sides(text: str, known: Mapping[str, float | None]) -> tuple[float | None, str, float | None]:
    match = _COMPARISON.fullmatch(text)
    assert match is not None  # noqa: S101 - VerdictRule() checks it
    left, sign, right = match.groups()
    return _value(left, known), sign, _value(right, known)


def _value(name: str, known: Mapping[str, float | None]) -> float | None:
    value = known[name] if name in known else float(name)
    return None if value is None or math.isnan(value) else float(value)


def _comparison_text(text: str, known: Mapping[str, float | None]) -> str:
    left, sign, right = _sides(text, known)
    true = _true(text, known)
    for digits in _DIGITS:
        shown = ["not known" if value is None else f"{value:.{digits}g}" for value in (left, right)]
        if left is None or right is None or _SIGNS[sign](*map(float, shown)) == true:
            break
    return f"{shown[0]} {sign} {shown[1]}: {'yes' if true else 'no'}"


ABOVE = VerdictRule(("low > bound",), ("high <= bound",))  # for a figure that is large if much is disclosed
BELOW = VerdictRule(
    ("high < bound",), ("low >= bound",)
)  # for the error of an attack, which is small if much is disclosed
COUNT = VerdictRule(
    ("estimate > bound",), ("estimate <= bound",)
)  # like ABOVE, but for an exact figure, which has no interval
CLAIM = VerdictRule(
    ("low > bound",), ("low <= bound",)
)  # for a claimed epsilon, if ``low`` already has a high confidence
_ROUNDING = 1e-6  # relative error in the calibration of an epsilon


def twice(strict: float, confidence: float) -> VerdictRule:
    """The rule for a claimed epsilon with two lower bounds: ``low`` at 95 %, and ``strict`` at a higher confidence.

    Audits are repeated, and at 95 % one audit in twenty refutes a true claim. So only ``strict`` can contradict the
    run.

    Args:
        strict: the lower bound on epsilon at ``confidence``.

    Example:
        >>> rules = [twice(strict, 0.9999) for strict in (3.0, 6.0, 12.0)]
        >>> [rule.verdict({"low": low, "bound": 8.0}) for rule, low in zip(rules, (5.0, 9.0, 20.0))]
        ['holds', 'inconclusive', 'leaks']
    """
    name = f"low at {100 * confidence:g} %"
    why = "for a true claim, one audit in twenty finds a lower bound above the claim; audit the run again"
    return VerdictRule((f"{name} > bound",), ("low <= bound",), why).with_numbers({name: strict})


def absorb_rounding(low: float, stated: float) -> float:
    """The lower bound ``low`` on an epsilon, or ``stated`` if ``low`` exceeds ``stated`` only by a rounding error.

    Example:
        >>> absorb_rounding(8.000001, 8.0), absorb_rounding(8.1, 8.0), absorb_rounding(3.0, 8.0)
        (8.0, 8.1, 3.0)
    """
    return stated if stated < low <= stated * (1 + _ROUNDING) else low


def refutes(low: float) -> str:
    """Say in words which values of epsilon a lower bound refutes.

    Example:
        >>> refutes(0.5), refutes(0.0)
        ('refutes every epsilon below 0.5', 'refutes no epsilon')
    """
    return f"refutes every epsilon below {low:.3g}" if low > 0 else "refutes no epsilon"


def against(verdict: Verdict) -> str:
    """The end of a sentence about a claimed epsilon, which depends on the verdict."""
    if verdict == "leaks":
        return ": it does not hold."
    return "." if verdict == "holds" else ", which is less; for a true claim, one audit in twenty finds this."


@dataclass(frozen=True)
class Finding:
    """A question about a run, and its answer.

    Attributes:
        name: a name that is unique in an audit.
        question: the question, as a user would ask it.
        estimate: the measured figure; None if the run is too small to measure it.
        low, high: the figure's interval, at 95 % unless ``says`` names another level.
        bound: the figure's limit: the figure of a random guess, or the figure that the run promises.
        rule: the rule by which these numbers decide the verdict.
        says: the answer in a sentence.
        contradicts: whether the measurement refutes a claim of the manifest.
        detail: further figures, as values for JSON.

    Raises:
        ValueError: a claim is contradicted, but the verdict is not ``leaks``.
    """

    name: str
    question: str
    estimate: float | None
    low: float | None
    high: float | None
    bound: float | None
    rule: VerdictRule
    says: str
    contradicts: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.contradicts and self.verdict != "leaks":
            raise ValueError(f"{self.name} contradicts a claim, but its verdict is {self.verdict}")

    @property
    def verdict(self) -> Verdict:
        """The verdict.

        - ``leaks``: an attacker learns something.
        - ``holds``: an attacker learns nothing, or no more than the run promises.
        - ``inconclusive``: the run is too small, or promises nothing about the question.
        """
        return self.rule.verdict(self._numbers)

    @property
    def _numbers(self) -> dict[str, float | None]:
        return {"estimate": self.estimate, "low": self.low, "high": self.high, "bound": self.bound}

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; numbers that are not finite become null."""
        found: dict[str, Any] = {"name": self.name, "question": self.question, **self._numbers}
        found |= {"verdict": self.verdict, "rule": self.rule.words(self._numbers), "says": self.says}
        found |= {"contradicts": self.contradicts, "detail": dict(self.detail)}
        return {key: finite(value) for key, value in found.items()}


def nothing(name: str, question: str, why: str) -> Finding:
    """The finding of a run that cannot answer the question."""
    return Finding(name, question, None, None, None, None, VerdictRule(otherwise="nothing was measured"), why)


def lines(findings: Sequence[Finding]) -> str:
    """The findings as text for the terminal: a table, then each finding's sentence and the rule of its verdict."""
    head = ("finding", "verdict", "estimate", "interval", "bound")
    rows = [head, *((f.name, *cells(f.to_dict())) for f in findings)]
    widths = [max(len(row[j]) for row in rows) for j in range(len(head))]
    out = ["  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    for f in findings:
        out += ["", f.question]
        for text in (f.says, f"{f.verdict}, by its rule: {f.to_dict()['rule']}."):
            joined = text.replace(" %", "\N{NO-BREAK SPACE}%")
            out += textwrap.wrap(joined, 110, initial_indent="  ", subsequent_indent="  ")
        out += ["  This refutes a claim of the run."] if f.contradicts else []
    return "\n".join(out)


def interval(low: float | None, high: float | None) -> str:
    """An interval as text in a sentence."""
    return "[no interval]" if low is None or high is None else f"[{low:.3f}, {high:.3f}]"


def plural(n: int, one: str) -> str:
    """A number and a noun, e.g. ``1 client`` or ``2 clients``."""
    return f"{n} {one}{'' if n == 1 else 's'}"


def cells(finding: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Verdict, estimate, interval and bound of a finding's dict, as text."""
    low, high = finding.get("low"), finding.get("high")
    interval = "" if low is None and high is None else f"{_number(low) or '..'} to {_number(high) or '..'}"
    return str(finding.get("verdict")), _number(finding.get("estimate")), interval, _number(finding.get("bound"))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
