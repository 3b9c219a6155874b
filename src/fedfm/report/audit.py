"""The section on audits: what attacks on this very run found, from its audit.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedfm.audits.finding import cells
from fedfm.report.page import details, note, table
from fedfm.report.read import RunFiles, mapping, numeric, sequence
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
    return alarm + note(esc(said)) + listing + "".join(map(_paragraph, found))


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
