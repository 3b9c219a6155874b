"""Verdicts on a paper's claims, computed from the rows: a difference, or a spread, seed by seed, against its bound."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rates import EDGE, FORBIDS

from fedfm.api.intervals import cut, interval

Doubts = Mapping[str, str]  # row -> what its rates forbid or leave open, empty where they were chosen at its point
Accuracies = Mapping[str, Mapping[str, float]]  # row -> seed -> accuracy in percent, or another figure
HEAD = "| what | bound, points | measured, points | seeds | verdict |\n|---|---|---|---|---|"
RATES = (
    "*No verdict*: a rate of one of the rows was not chosen on validation rows at that row's own point, but borrowed "
    "from another row or point, taken from the paper, or set by hand; the difference stands, and decides nothing. "
    "*At a grid's edge*: the best of the values searched was the last one tried, so that a better one may lie beyond."
)


PERCENT = (0.0, 100.0)  # what an accuracy can be; other figures by what stands behind the colon of a row
RANGES = {
    "own_loss": (0.0, math.inf),
    "start_loss": (0.0, math.inf),
    "perplexity": (0.0, math.inf),
    "score": (-math.inf, 100.0),
    "fall": (-math.inf, 100.0),
}


def spread(values: Sequence[float], limits: tuple[float, float], digits: int = 1, sign: str = "") -> str:
    """``90.2 ± 0.3``: mean and half of its 95 % interval over the seeds; or the one value.

    Where that interval would leave what the figure can be, its ends: ``97.5 (94.1 to 100.0)``.

    Args:
        limits: the least and the most that the figure can be.
        sign: "+": of a figure above 0, too.
    """
    mean, half = interval(values)
    low, high = cut(values, *limits)
    figure = f"{mean:{sign}.{digits}f}"
    if len(values) < 2:
        return figure
    if (low, high) == (mean - half, mean + half):
        return f"{figure} ± {half:.{digits}f}"
    return f"{figure} ({low:{sign}.{digits}f} to {high:{sign}.{digits}f})"


def limits(check: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the most that the figure of a check can be, in points."""
    ranges = {name: RANGES.get(name.partition(":")[2], PERCENT) for name in rows_of(check)}
    if "spread" in check:
        return 0.0, max(high for _, high in ranges.values()) - min(low for low, _ in ranges.values())
    ends = [sorted(factor * end for end in ranges[name]) for name, factor in factors_of(check).items() if factor]
    return sum(low for low, _ in ends), sum(high for _, high in ends)


def lines(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[str]:
    """The section of a page: each claim with a table of what it says of which rows."""
    out: list[str] = []
    for claim in claims:
        if "columns" in claim:
            rows = _side_by_side(claim, found, doubts)
        elif rows := [line for check in claim["checks"] if (line := _line(check, found, doubts))]:
            rows = [HEAD, *rows]
        if rows:
            out += [f"**{claim['claim']}**", "", *rows, ""]
    return out


def verdicts(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[dict[str, str]]:
    """``claim``, ``what``, ``bound``, ``measured``, ``seeds`` and ``verdict`` of each check whose rows are there."""
    out = []
    for claim in claims:
        for check in claim["checks"]:
            if said := _said(check, found, doubts):
                what, bound, figure, seeds, decided = said
                place = f"{check['column']}, {what}" if "column" in check else what
                told = {"what": place, "bound": bound, "measured": figure, "seeds": seeds, "verdict": decided}
                out.append({"claim": claim["claim"]} | told)
    return out


def measured(check: Mapping[str, Any], found: Accuracies) -> dict[str, float]:
    """Seed -> points: ``left`` minus ``right``, the ``sum`` of rows times factors, or the largest minus the smallest of
    ``spread``; only common seeds.
    """
    names = rows_of(check)
    if not all(name in found for name in names):
        return {}
    seeds = sorted(set.intersection(*(set(found[name]) for name in names)))
    if "spread" in check:
        return {s: max(found[n][s] for n in names) - min(found[n][s] for n in names) for s in seeds}
    return {s: sum(factor * found[n][s] for n, factor in factors_of(check).items()) for s in seeds}


def factors_of(check: Mapping[str, Any]) -> dict[str, float]:
    """The rows that a check adds up, with their factors."""
    return check.get("sum") or {check["left"]: 1, check["right"]: -1}


def rows_of(check: Mapping[str, Any]) -> list[str]:
    """The rows that a check compares."""
    return list(check.get("spread") or check.get("sum") or [check["left"], check["right"]])


def verdict(values: list[float], bound: float, *, at_least: bool) -> str:
    """Whether the whole 95 % interval of the mean is on the claim's side, or the mean alone."""
    mean, half = interval(values)
    sign = 1.0 if at_least else -1.0
    gap = sign * (mean - bound)
    if len(values) > 1 and all(v == bound for v in values):
        return "open: equal"
    if len(values) < 2:
        return f"one seed: its sign {'holds' if gap >= 0 else 'does not'}"
    if abs(gap) <= half:
        return f"open: the mean {'holds' if gap >= 0 else 'does not'}"
    return "holds" if gap > 0 else "does not hold"


def judged(check: Mapping[str, Any], verdict: str, doubts: Doubts) -> str:
    """The verdict, as far as the rates of the check's rows allow one."""
    if why := doubt(check, doubts):
        return f"{verdict}, {EDGE}" if why == EDGE else f"no verdict: {why}"
    return verdict


def doubt(check: Mapping[str, Any], doubts: Doubts) -> str:
    """Of the rows of a check: what forbids a verdict; or that a value is at its grid's edge; or nothing."""
    found = {doubts[row.partition(":")[0]] for row in rows_of(check)}
    return next((why for why in (*FORBIDS.values(), EDGE) if why in found), "")


def tally(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[str]:
    """One sentence: how many lines have no verdict, and why."""
    checks = [check for claim in claims for check in claim["checks"] if measured(check, found)]
    reasons = Counter(why for check in checks if (why := doubt(check, doubts)) and why != EDGE)
    if not reasons:
        return [f"All {len(checks)} differences have a verdict."]
    said = ", ".join(f"{why}: {count}" for why, count in reasons.most_common())
    return [f"Of {len(checks)} differences {sum(reasons.values())} have no verdict ({said})."]


def _side_by_side(claim: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> list[str]:
    """Checks that agree in what they say, bound and seeds in one line; each in its ``column``, figure and verdict."""
    columns: list[str] = claim["columns"]
    by_line: dict[tuple[str, str, str], dict[str, str]] = {}
    for check in claim["checks"]:
        if check["column"] not in columns:
            raise ValueError(f"{claim['claim']}: {check['what']} is of {check['column']!r}, which is none of {columns}")
        if said := _said(check, found, doubts):
            what, bound, figure, seeds, decided = said
            by_line.setdefault((what, bound, seeds), {})[check["column"]] = f"{figure} {decided}"
    head = [f"| what | bound, points | {' | '.join(columns)} | seeds |", f"|---|---|{'---|' * len(columns)}---|"]
    rows = [
        f"| {what} | {bound} | {' | '.join(cells.get(c, '') for c in columns)} | {seeds} |"
        for (what, bound, seeds), cells in by_line.items()
    ]
    return head + rows if rows else []


def _line(check: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> str:
    said = _said(check, found, doubts)
    return f"| {' | '.join(said)} |" if said else ""


def _said(check: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> tuple[str, str, str, str, str] | None:
    """What, bound, measured, seeds and verdict; None where rows are missing."""
    by_seed = measured(check, found)
    if not by_seed:
        return None
    values = list(by_seed.values())
    at_least = "at_least" in check
    bound = check["at_least"] if at_least else check["at_most"]
    return (
        check["what"],
        f"at {'least' if at_least else 'most'} {bound:g}",
        spread(values, limits(check), sign="+" if at_least else ""),
        ", ".join(by_seed),
        judged(check, verdict(values, bound, at_least=at_least), doubts),
    )
