"""The section on audits: what attacks on this very run found, from its audit.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.audits.finding import cells
from fedfm.report.page import details, figure, note, table
from fedfm.report.read import RunFiles, mapping, numeric, sequence
from fedfm.report.svg import ChartBar, bars
from fedfm.report.text import esc, number, plural

FILE = "audit.json"


def section(run: RunFiles) -> str:
    """A table of verdicts, then a paragraph for each finding; nothing where no audit was made."""
    found = _read(run)
    if found is None:
        return ""
    if not found:
        return note("audit.json lies in the run, and is not what <code>fedfm audit</code> writes.")
    rows = [[str(f.get("name")), *cells(f)] for f in found]
    listing = table(["finding", "verdict", "estimate", "interval", "line"], rows, "Findings", words=(1, 3))
    refuted = [f for f in found if f.get("contradicts") is True]
    said = "Attacks on a replay of this run, by whoever sees what its server saw. The line is what a finding is held "
    said += "against: above it an attacker learns something."
    alarm = ""
    if refuted:
        names = ", ".join(esc(f.get("name")) for f in refuted)
        alarm = f'<aside role="alert"><strong>What this run claims does not hold</strong><p>{names}</p></aside>'
    return alarm + note(esc(said)) + listing + _extraction(found) + "".join(map(_paragraph, found))


def _extraction(found: Sequence[Mapping[str, Any]]) -> str:
    """How near each coalition comes to the server's foundation model."""
    rows, spans, line = list[ChartBar](), list[tuple[float, float] | None](), 0.0
    for f in found:
        name, error = str(f.get("name")), numeric(f.get("estimate"))
        if not name.startswith("extraction.") or error is None or name.endswith("hidden_sums"):
            continue
        low, high = numeric(f.get("low")), numeric(f.get("high"))
        line = numeric(f.get("bound")) or 0.0
        rows.append(ChartBar(name.removeprefix("extraction.").replace("_", " "), error, number(error)))
        spans.append((low, high) if low is not None and high is not None else None)
    if not rows:
        return ""
    most = max([line, *(r.value or 0.0 for r in rows), *(s[1] for s in spans if s)])
    label = "Relative error of the foundation model as clients compute it, with the range over coalitions."
    return figure(lambda w: bars(w, rows, label, most, (line, "line"), spans)) + note(esc(label))


def _paragraph(f: Mapping[str, Any]) -> str:
    told = mapping(f.get("detail"))
    body = f"<h3>{esc(f.get('question'))}</h3><p>{esc(f.get('says'))}</p>"
    groups = mapping(told.get("by_rows_of_the_class"))
    if groups:
        shown = [
            [str(k), *(number(numeric(mapping(v).get(x))) for x in ("auc", "low", "high", "rows"))]
            for k, v in groups.items()
        ]
        head = ["rows of the class", "AUC", "low (99 %)", "high (99 %)", "training rows"]
        body += details("By rows of the class at the client", table(head, shown, "AUC by rows of the class"))
    read = {str(k): numeric(v) for k, v in mapping(told.get("by_tensor")).items()}
    tensors = {k: v for k, v in read.items() if v is not None}
    if tensors:
        shown = [[k, number(v)] for k, v in sorted(tensors.items(), key=lambda i: -i[1])]
        body += details("By tensor", table(["tensor", "relative error"], shown, "Error by tensor"))
    leaks = [mapping(leak) for leak in sequence(told.get("leaks"))]
    if leaks:
        # Row numbers stay in audit.json, which only its owner may read.
        shown = [
            [
                str(x.get("client")),
                str(x.get("class")),
                *(number(numeric(x.get(k))) for k in ("component", "ratio", "carries")),
            ]
            for x in leaks
        ]
        head = ["client", "class", "component", "distance / neighbours'", "examples carried"]
        body += details(plural(len(leaks), "component"), table(head, shown, "Components on single rows", words=(1,)))
    return body


def _read(run: RunFiles) -> list[Mapping[str, Any]] | None:
    try:
        value = json.loads((run.path / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return []
    return [mapping(f) for f in sequence(mapping(value).get("findings")) if mapping(f)]
