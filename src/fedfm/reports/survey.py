"""The section about what the silos hold, by ``fedfm survey``, and the same as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, sequence
from fedfm.reports.survey_rules import risks_of
from fedfm.reports.text import NONE, count, esc, number, percent

_HEAD = ("property", "group", "rows", "share")
_DRIFT_HEAD = ("what", "between silos", "without chance", "groups of a silo", "groups of all")
_RISK_HEAD = ("risk", "figure", "value", "rule", "what follows")
_SILO_HEAD = ("silo", "rows", "distance of targets", "distance of features", "by chance")


def section(run: RunFiles) -> str:
    """Tables of the figures, of the drift between silos, and of the risks that follow."""
    found = dict(mapping(mapping(run.result.get("details")).get("survey")))
    found.setdefault("risks", risks_of(found))
    parts = [note(esc(summary(found)))]
    parts.append("<h3>What follows</h3>" + _table(_RISK_HEAD, _risk_rows(found), "Risks", (1, 3, 4)))
    parts.append("<h3>Drift between silos</h3>" + _table(_DRIFT_HEAD, _drift_rows(found), "Drift between silos"))
    parts.append(note(esc(_ABOUT_DRIFT)))
    parts.append("<h3>Rows</h3>" + _table(_HEAD, _count_rows(found), "Rows by group", (1,)))
    if rows := _silo_rows(found):
        parts.append("<h3>Silos</h3>" + _table(_SILO_HEAD, rows, "Silos"))
    return "".join(parts)


_ABOUT_DRIFT = (
    "The share of the spread that the silo explains: 0 if all silos have the same rows on average, 1 if a row's silo "
    "determines it. Without chance: this share minus the share that silos of these sizes would show if their rows were "
    "drawn from one distribution. Groups: the effective number, 1 / sum of squared shares."
)


def summary(found: Mapping[str, Any]) -> str:
    """One sentence on silos, rows, protection, and who read what."""
    rows = found.get("rows")
    text = f"{found.get('silos')} silos with {'few' if rows is None else count(rows)} training rows"
    if without := found.get("silos_without_sums"):
        text += f"; {without} more sent no sums, since they have fewer than {found.get('hidden_below')} rows"
    noise = mapping(found.get("noise"))
    if noise:
        text += f"; noise of standard deviation {number(noise.get('deviation_of_counts'))} on every count"
        if found.get("epsilon") is not None:
            text += f", epsilon = {number(found['epsilon'])}, delta = {number(found.get('delta'))} for a record"
    else:
        text += f"; counts below {found.get('hidden_below')} are hidden"
    if found.get("silos") == 2 and not noise and not found.get("by_silo"):
        text += "; drift of groups is left out, since with the totals it would determine the counts of both silos"
    readable = mapping(found.get("readable"))
    return f"{text}." + (f" The server read {readable.get('server')}." if readable else "")


def text(found: Mapping[str, Any]) -> str:
    """The figures and risks for a terminal."""
    lines = [summary(found), "", *_columns(_DRIFT_HEAD, _drift_rows(found)), ""]
    lines += _columns(_HEAD, _count_rows(found, zeros=False))
    if rows := _silo_rows(found):
        lines += ["", *_columns(_SILO_HEAD, rows)]
    lines.append("")
    for risk in map(mapping, sequence(found.get("risks"))):
        lines += [
            f"{risk['risk']}: {risk['figure']} = {number(risk['value'])} ({risk['rule']})",
            f"  {risk['advice']}",
        ]
    if not sequence(found.get("risks")):
        lines.append("no rule found a risk: any method fits, e.g. fedavg")
    return "\n".join(lines)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], label: str, words: tuple[int, ...] = ()) -> str:
    return table(head, rows, label, words) if rows else note("None.")


def _columns(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)
    ]


def _count_rows(found: Mapping[str, Any], *, zeros: bool = True) -> list[tuple[str, ...]]:
    lines, rows = list[tuple[str, ...]](), found.get("rows")
    for name, about in mapping(found.get("counts")).items():
        for group, n in zip(about["groups"], about["counts"], strict=True):
            if n or zeros or n is None:
                share = percent(n / rows) if n is not None and rows else NONE
                lines.append((_words(name), str(group), "hidden" if n is None else count(n), share))
    return lines


def _drift_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    features = mapping(found.get("features"))
    of = {**mapping(found.get("counts")), **({"features": features} if features else {})}
    of |= {"features within classes": features["within_classes"]} if "within_classes" in features else {}
    for name, about in of.items():
        if about.get("between") is not None:
            more = f" ± {number(about['deviation'])}" if "deviation" in about else ""
            effective = [number(about.get("effective_groups", {}).get(key)) for key in ("silo", "all")]
            lines.append((_words(name), f"{number(about['between'])}{more}", number(about["adjusted"]), *effective))
    if far := mapping(features.get("from_reference")):
        lines.append(("features, from the reference", number(far["distance"]), NONE, NONE, NONE))
    return lines


def _silo_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for name, about in mapping(found.get("by_silo")).items():
        rows = "hidden" if about["rows"] is None else count(about["rows"])
        lines.append((name, rows, *(number(about.get(key)) for key in ("targets", "features", "by_chance"))))
    apart = mapping(found.get("silos_by_distance"))
    for group, n in zip(apart.get("groups", ()), apart.get("counts", ()), strict=True):
        if n:
            lines.append((f"silos: {count(n)}", NONE, NONE, str(group), NONE))
    return lines


def _risk_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    keys = ("risk", "figure", "value", "rule", "advice")
    return [
        tuple(number(risk[key]) if key == "value" else str(risk[key]) for key in keys)
        for risk in map(mapping, sequence(found.get("risks")))
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")
