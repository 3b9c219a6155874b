"""The section on classes: what the model takes for what on the global test rows, with the scores of each class."""

from __future__ import annotations

from collections.abc import Sequence

from fedfm.report.page import details, figure, note, table
from fedfm.report.read import RunFiles, mapping, numeric, sequence
from fedfm.report.svg import heat
from fedfm.report.text import count, esc, percent

_MOST = 40  # classes in the drawing


def section(run: RunFiles) -> str:
    """A confusion matrix and a table; nothing unless the result has the counts."""
    cells = [[numeric(n) or 0.0 for n in sequence(row)] for row in sequence(_found(run))]
    if not cells or any(len(row) != len(cells) for row in cells):
        return ""
    known = [str(c) for c in sequence(mapping(run.manifest.get("model")).get("classes"))]
    names = [*known, *(f"class {i}" for i in range(len(known), len(cells)))][: len(cells)]
    own = run.value("accuracy") == run.value("local_accuracy") != run.value("global_accuracy")
    several = own and len(run.manifest.get("clients") or ()) > 1
    text = "Global test rows; a line is a true class, a column what the model says. "
    text += "All clients' models are added up. " if several else ""
    rows = []
    for i, name in enumerate(names):
        hit, actual, guessed = cells[i][i], sum(cells[i]), sum(row[i] for row in cells)
        recall, precision = (hit / n if n else None for n in (actual, guessed))
        f1 = 2 * hit / (actual + guessed) if actual + guessed else None
        rows.append(
            [name, count(int(actual)), *(percent(v) for v in (recall, precision, f1)), _wrong(cells[i], i, names)]
        )
    head = ["class", "test rows", "recall", "precision", "F1", "most often taken for"]
    listing = table(head, rows, "Scores of each class", words=(5,))
    if len(cells) > _MOST:
        return note(esc(text)) + listing
    shares = [
        (name, [n / sum(row) if sum(row) else 0.0 for n in row], count(int(sum(row))))
        for name, row in zip(names, cells, strict=True)
    ]
    label = f"Confusion matrix of {len(names)} classes, as shares of each true class."
    drawn = figure(lambda w: heat(w, shares, names, label, 1.0))
    counts = [[name, *(count(int(n)) for n in row)] for name, row in zip(names, cells, strict=True)]
    return note(esc(text)) + drawn + listing + details("All counts", table(["true class", *names], counts, "Counts"))


def _found(run: RunFiles) -> object:
    return mapping(run.result.get("details")).get("confusion")


def _wrong(row: Sequence[float], own: int, names: Sequence[str]) -> str:
    """The class that rows of this one are most often taken for, with their share."""
    wrong = [(n, -j) for j, n in enumerate(row) if j != own and n]
    if not wrong:
        return ""
    n, j = max(wrong)
    return f"{names[-j]} ({percent(n / sum(row))})"
