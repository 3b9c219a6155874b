"""The section about audits: the findings in the run's audit.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.audits import findings_file
from fedfm.reports.page import aside, details, figure, note, table
from fedfm.reports.read import RunFiles, mapping, numeric, sequence
from fedfm.reports.svg import ChartBar, bars
from fedfm.reports.text import esc, number, plural


def findings(run: RunFiles) -> list[Mapping[str, Any]] | None:
    """The findings in the run's audit.json.

    The result is None if there is no such file, or if the run's parameters changed after the audit. It is empty if
    ``fedfm audit`` did not write the file.
    """
    content = findings_file.read(run.path)
    return None if content is None or is_outdated(run) else findings_file.findings(content)


def is_outdated(run: RunFiles) -> bool:
    """Whether the run was continued after its audit, so that the findings are about earlier parameters."""
    return not findings_file.is_about(findings_file.read(run.path) or {}, run.result.get("params_sha256"))


def section(run: RunFiles) -> str:
    """A table of verdicts, then a paragraph for each finding; empty if there was no audit."""
    found = findings(run)
    if found is None:
        return (
            note("The run continued after its audit: run <code>fedfm audit</code> again.") if is_outdated(run) else ""
        )
    if not found:
        return note("The run has an audit.json that <code>fedfm audit</code> did not write.")
    from fedfm.audits.finding import cells

    rows = [[str(f.get("name")), *cells(f)] for f in found]
    listing = table(["finding", "verdict", "estimate", "interval", "bound"], rows, "Findings", words=(1, 3))
    text = "These attacks work on a replay of this run. Each question says what the attacker knows. The lines "
    text += "below the question give the rule of the verdict and its numbers."
    refuted = [str(f.get("name")) for f in found if f.get("contradicts") is True]
    alarm = aside("This run's claims do not hold", refuted, ' role="alert"')
    return alarm + note(esc(text)) + listing + _extraction(found) + "".join(map(_paragraph, found))


def _extraction(found: Sequence[Mapping[str, Any]]) -> str:
    """A chart of the errors with which coalitions of clients compute the server's foundation model."""
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
    label = "Relative error of the foundation model that coalitions of clients compute, with its range."
    return figure(lambda w: bars(w, rows, label, most, (line, "bound"), spans)) + note(esc(label))


def _paragraph(f: Mapping[str, Any]) -> str:
    detail = mapping(f.get("detail"))
    body = f"<h3>{esc(f.get('question'))}</h3><p>{esc(f.get('says'))}</p>"
    if f.get("rule"):
        body += note(f"{esc(f.get('verdict'))}, by its rule: {esc(f.get('rule'))}.")
    groups = mapping(detail.get("by_rows_of_the_class"))
    if groups:
        shown = [
            [str(k), *(number(numeric(mapping(v).get(x))) for x in ("auc", "low", "high", "rows"))]
            for k, v in groups.items()
        ]
        head = ["rows of the class", "AUC", "low (99 %)", "high (99 %)", "training rows"]
        body += details("By number of rows of the class at the client", table(head, shown, "AUC by rows of the class"))
    read = {str(k): numeric(v) for k, v in mapping(detail.get("by_tensor")).items()}
    tensors = {k: v for k, v in read.items() if v is not None}
    if tensors:
        shown = [[k, number(v)] for k, v in sorted(tensors.items(), key=lambda i: -i[1])]
        body += details("By tensor", table(["tensor", "relative error"], shown, "Error by tensor"))
    leaks = [mapping(leak) for leak in sequence(detail.get("leaks"))]
    if leaks:
        # The report leaves out the numbers of the rows; they are in audit.json, which only its owner can read.
        keys = ("component", "ratio", "carries")
        shown = [[str(x.get("client")), str(x.get("class")), *(number(numeric(x.get(k))) for k in keys)] for x in leaks]
        head = ["client", "class", "component", "distance / neighbours'", "examples carried"]
        body += details(plural(len(leaks), "component"), table(head, shown, "Components on single rows", words=(1,)))
    return body
