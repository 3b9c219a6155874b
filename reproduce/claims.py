"""Verdicts on a paper's claims, computed from the rows: a difference, or a spread, seed by seed, against its bound.

A comparison is a claim only if each of its rows has the rate that is best for it at its own point. The others stand
apart, without bound and verdict, each with where its rates came from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rates import BORROWED, EDGE, FORBIDS

from fedfm.api.intervals import cut, interval, quantile

Doubts = Mapping[str, str]  # row -> what its rates forbid or leave open, empty where they were chosen at its point
Accuracies = Mapping[str, Mapping[str, float]]  # row -> seed -> accuracy in percent, or another figure
HEAD = "| what | bound, points | measured, points | seeds | verdict |\n|---|---|---|---|---|"
RATES = (
    "A difference is a claim only if each of its rows has a rate that was chosen on validation rows at its own point. "
    "*At a grid's edge*: the best of the values searched was the last one tried, so a better one may lie outside the "
    "grid."
)
OPEN = (
    "*Open*: the number in brackets is how many seeds would decide the line if mean and standard deviation stayed as "
    "they are."
)
SECOND = (
    "A line of ten seeds or more is a second look: three or five seeds had left lines of its table open, and the "
    "number of seeds was fixed before the others were run. If the true difference is the bound, one look decides "
    "wrongly in 5 of 100 cases, two looks in 9."
)
MOST = 100  # seeds that a claim could be worth
NO_CLAIMS = "Comparisons that are not claims"
LEFT_OUT = (
    "A rate of one of the rows was not chosen at that row's own point, so these differences decide nothing about "
    "the paper: no bound, no verdict. The figures are in the unit of the claims."
)
QUANTITIES = {  # what stands behind the colon of a row
    "own": "theta_i",
    "start": "theta_bar_i",
    "own_loss": "loss of theta_i",
    "start_loss": "loss of theta_bar_i",
    "before": "before aggregation",
    "global": "on all test rows",
    "perplexity": "perplexity",
    "fall": "fall of tau_t",
}


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
    """``claim``, ``what``, ``bound``, ``measured``, ``seeds`` and ``verdict`` of each check that is a claim."""
    out = []
    for claim in claims:
        for check in claim["checks"]:
            if said := _table_row(check, found, doubts):
                what, bound, figure, seeds, decided = said
                place = f"{check['column']}, {what}" if "column" in check else what
                result = {"what": place, "bound": bound, "measured": figure, "seeds": seeds, "verdict": decided}
                out.append({"claim": claim["claim"]} | result)
    return out


def no_claims(
    claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts, choices: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """A table of the comparisons that are not claims: which rows, the figure, and where their rates came from.

    Args:
        choices: row -> how its rates came about, as ``Choice.to_dict`` gives it.
    """
    out = []
    for check in left_out(claims, found, doubts):
        values = points_by_seed(check, found)
        figure = spread(list(values.values()), limits(check), sign="+")
        tables = dict.fromkeys(row.partition("__")[0] for row in rows_of(check))
        cells = (", ".join(f"`{t}`" for t in tables), _compared_rows(check), figure, _seeds(list(values)))
        out.append(f"| {' | '.join(cells)} | {_origins(check, doubts, choices)} |")
    return ["| table | rows | measured, points | seeds | rates |", "|---|---|---|---|---|", *out] if out else []


def left_out(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[dict[str, Any]]:
    """The checks that are not claims, since a rate of theirs was not chosen at its row's own point."""
    checks = [check for claim in claims for check in claim["checks"] if points_by_seed(check, found)]
    return [check for check in checks if _forbidden(check, doubts)]


def points_by_seed(check: Mapping[str, Any], found: Accuracies) -> dict[str, float]:
    """Seed -> points: ``left`` minus ``right``, the ``sum`` of rows times factors, or the largest minus the smallest of
    ``spread``; only common seeds.
    """
    names = rows_of(check)
    if not all(name in found for name in names):
        return {}
    seeds = sorted(set.intersection(*(set(found[name]) for name in names)), key=int)
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
        return f"open: the mean {'holds' if gap >= 0 else 'does not'} ({seeds_needed(values, bound)})"
    return "holds" if gap > 0 else "does not hold"


def seeds_needed(values: Sequence[float], bound: float) -> str:
    """``12 seeds``: so many would decide an open claim if mean and standard deviation stayed what they are."""
    mean, half = interval(values)
    deviation = half / quantile(len(values)) * math.sqrt(len(values))
    for n in range(len(values) + 1, MOST + 1):
        if quantile(n) * deviation / math.sqrt(n) < abs(mean - bound):
            return f"{n} seeds"
    return f"over {MOST} seeds"


def verdict_of(check: Mapping[str, Any], verdict: str, doubts: Doubts) -> str:
    """The verdict, and whether a value that it rests on is at its grid's edge."""
    return f"{verdict}, {EDGE}" if EDGE in _doubts_of(check, doubts) else verdict


def reasons(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> str:
    """Why comparisons are not claims, and how many for each reason; empty if all are."""
    counted = Counter(_forbidden(check, doubts) for check in left_out(claims, found, doubts))
    return ", ".join(f"{why}: {count}" for why, count in counted.most_common())


def tally(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[str]:
    """One sentence: how many comparisons are claims, how many are not, and why."""
    count = len(verdicts(claims, found, doubts))
    if not (why := reasons(claims, found, doubts)):
        return [f"All {count} differences are claims."]
    others = len(left_out(claims, found, doubts))
    link = f"[below](#{NO_CLAIMS.lower().replace(' ', '-')})"
    return [f"Of {count + others} differences {count} are claims. The others ({why}) stand {link}."]


def looks(claims: list[dict[str, Any]], found: Accuracies, doubts: Doubts) -> list[str]:
    """What the brackets of open lines and many seeds mean, where a page has them."""
    of = [check for claim in claims for check in claim["checks"]]
    brackets = any(line[-1].startswith("open: the mean") for check in of if (line := _table_row(check, found, doubts)))
    many = any(len(points_by_seed(check, found)) >= 10 for check in of)
    return [" ".join([OPEN] * brackets + [SECOND] * many)] if brackets or many else []


def _doubts_of(check: Mapping[str, Any], doubts: Doubts) -> set[str]:
    return {doubts[row.partition(":")[0]] for row in rows_of(check)}


def _forbidden(check: Mapping[str, Any], doubts: Doubts) -> str:
    """The reason why a check is not a claim, which its rows give; "" if there is none."""
    found = _doubts_of(check, doubts)
    return next((why for why in FORBIDS.values() if why in found), "")


def _compared_rows(check: Mapping[str, Any]) -> str:
    """The rows of a check by their names: ``a`` less ``b``."""
    if "spread" in check:
        return f"the largest less the smallest of {', '.join(map(_row_name, rows_of(check)))}"
    first, *others = factors_of(check).items()
    words = [
        _row_name(row) if abs(factor) == 1 else f"{abs(factor):g} {_row_name(row)}" for row, factor in (first, *others)
    ]
    signs = ["less" if factor < 0 else "plus" for _, factor in others]
    return words[0] + "".join(f" {sign} {word}" for sign, word in zip(signs, words[1:], strict=True))


def _row_name(row: str) -> str:
    name, _, quantity = row.partition("__")[2].partition(":")
    return f"`{name}`" + (f" ({QUANTITIES[quantity]})" if quantity else "")


def _origins(check: Mapping[str, Any], doubts: Doubts, choices: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence on the rates of a check's rows that were not chosen at their own point."""
    by_reason: dict[str, list[str]] = {}
    for row in dict.fromkeys(row.partition(":")[0] for row in rows_of(check)):
        if (why := doubts[row]) in FORBIDS.values():
            table, of = row.partition("__")[0], choices.get(row, {}).get("of", "")
            said = f" from `{of.removeprefix(f'{table}__')}`" if why == FORBIDS[BORROWED] and of else ""
            by_reason.setdefault(why, []).append(f"{_row_name(row)}{said}")
    return "; ".join(f"{why}: {', '.join(rows)}" for why, rows in by_reason.items())


def _side_by_side(claim: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> list[str]:
    """Checks that agree in what they say, bound and seeds in one line; each in its ``column``, figure and verdict."""
    columns: list[str] = claim["columns"]
    by_line: dict[tuple[str, str, str], dict[str, str]] = {}
    for check in claim["checks"]:
        if check["column"] not in columns:
            raise ValueError(f"{claim['claim']}: {check['what']} is of {check['column']!r}, which is none of {columns}")
        if said := _table_row(check, found, doubts):
            what, bound, figure, seeds, decided = said
            by_line.setdefault((what, bound, seeds), {})[check["column"]] = f"{figure} {decided}"
    columns = [column for column in columns if any(column in cells for cells in by_line.values())]
    head = [f"| what | bound, points | {' | '.join(columns)} | seeds |", f"|---|---|{'---|' * len(columns)}---|"]
    rows = [
        f"| {what} | {bound} | {' | '.join(cells.get(c, '') for c in columns)} | {seeds} |"
        for (what, bound, seeds), cells in by_line.items()
    ]
    return head + rows if rows else []


def _line(check: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> str:
    said = _table_row(check, found, doubts)
    return f"| {' | '.join(said)} |" if said else ""


def _table_row(check: Mapping[str, Any], found: Accuracies, doubts: Doubts) -> tuple[str, str, str, str, str] | None:
    """What, bound, measured, seeds and verdict; None where rows are missing, or the comparison is not a claim."""
    by_seed = points_by_seed(check, found)
    if not by_seed or _forbidden(check, doubts):
        return None
    values = list(by_seed.values())
    at_least = "at_least" in check
    bound = check["at_least"] if at_least else check["at_most"]
    return (
        check["what"],
        f"at {'least' if at_least else 'most'} {bound:g}",
        spread(values, limits(check), sign="+" if at_least else ""),
        _seeds(list(by_seed)),
        verdict_of(check, verdict(values, bound, at_least=at_least), doubts),
    )


def _seeds(seeds: Sequence[str]) -> str:
    """``0, 1, 2``; many that follow each other by their ends, ``0 to 29``."""
    numbers = [int(s) for s in seeds]
    follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{seeds[0]} to {seeds[-1]}" if follow and len(numbers) > 5 else ", ".join(seeds)
