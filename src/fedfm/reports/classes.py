"""The section about classes: the confusion matrix on the global test rows, and the scores of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports.page import details, figure, note, table
from fedfm.reports.read import RunFiles, mapping, numeric, sequence
from fedfm.reports.svg import heat
from fedfm.reports.text import count, esc, percent

_MOST = 40  # largest number of classes in a matrix
_KEPT = 1000  # largest number of classes for which a result has counts of each class
_WORST = 5  # largest number of worst classes, and of most frequent mistakes, that the text names
_ALL = 60  # a table with more classes is folded


class _ClassLine(NamedTuple):
    """Counts of one class.

    The fields after the name are: the number of the class's rows; the number of rows that are predicted as this class;
    how many of these predictions are right; the wrong class most often predicted for its rows, and how often.
    """

    name: str
    rows: float
    said: float
    right: float
    wrong: str = ""
    mistaken: float = 0.0

    @property
    def f1(self) -> float | None:
        return 2 * self.right / (self.rows + self.said) if self.rows + self.said else None

    def line(self) -> list[str]:
        recall, precision = (self.right / n if n else None for n in (self.rows, self.said))
        taken = f"{self.wrong} ({percent(self.mistaken / self.rows)})" if self.mistaken else ""
        return [self.name, count(int(self.rows)), *(percent(v) for v in (recall, precision, self.f1)), taken]


def section(run: RunFiles) -> str:
    """A table and the confusion matrix (or the reason why there is none); empty if the result has no class counts."""
    own = run.value("accuracy") == run.value(LOCAL_ACCURACY) != run.value(GLOBAL_ACCURACY)
    several = own and len(run.manifest.get("clients") or ()) > 1
    text = "Counts of all clients' models are added up. " if several else ""
    if cells := _cells(run):
        return _from_matrix(_names(run, len(cells)), cells, text)
    counts = mapping(mapping(run.result.get("details")).get("class_counts"))
    lists = [[numeric(n) or 0.0 for n in sequence(counts.get(key))] for key in ("rows", "predicted", "right")]
    names = _names(run, len(lists[0]))
    if names and all(len(values) == len(names) for values in lists):
        return _from_counts(names, lists, counts, text)
    known = sequence(mapping(run.manifest.get("model")).get("classes"))
    if known and run.value(GLOBAL_ACCURACY) is None and run.value(LOCAL_ACCURACY) is not None:
        return note("The server has no test rows, and silos send no counts: there are no scores of classes.")
    if len(known) > _KEPT and run.value(GLOBAL_ACCURACY) is not None:
        return note(
            f"Scores of single classes are kept for up to {count(_KEPT)} classes; this run has {count(len(known))}."
        )
    return ""


def _cells(run: RunFiles) -> list[list[float]]:
    """The confusion matrix; empty if the result has none."""
    found = mapping(run.result.get("details")).get("confusion")
    cells = [[numeric(n) or 0.0 for n in sequence(row)] for row in sequence(found)]
    return [] if any(len(row) != len(cells) for row in cells) else cells


def _names(run: RunFiles, number: int) -> list[str]:
    known = [str(c) for c in sequence(mapping(run.manifest.get("model")).get("classes"))]
    return [*known, *(f"class {i}" for i in range(len(known), number))][:number]


def _from_matrix(names: Sequence[str], cells: list[list[float]], text: str) -> str:
    scored = []
    for i, name in enumerate(names):
        n, j = max(((n, -j) for j, n in enumerate(cells[i]) if j != i), default=(0.0, 0))
        scored.append(_ClassLine(name, sum(cells[i]), sum(row[i] for row in cells), cells[i][i], names[-j], n))
    if len(cells) > _MOST:
        wrong = [(cells[i][j], i, j) for i in range(len(cells)) for j in range(len(cells)) if i != j and cells[i][j]]
        pairs = [(i, j, n) for n, i, j in sorted(wrong, key=lambda cell: (-cell[0], *cell[1:]))]
        return _in_words(names, scored, pairs, text)
    shares = [
        (name, [n / sum(row) if sum(row) else 0.0 for n in row], count(int(sum(row))))
        for name, row in zip(names, cells, strict=True)
    ]
    label = f"Confusion matrix of {len(names)} classes, as shares of each true class."
    drawn = figure(lambda w: heat(w, shares, names, label, 1.0))
    counts = [[name, *(count(int(n)) for n in row)] for name, row in zip(names, cells, strict=True)]
    text = f"Global test rows; a row is a true class, a column the predicted class; right: test rows. {text}"
    return (
        note(esc(text))
        + drawn
        + _listing(scored)
        + details("All counts", table(["true class", *names], counts, "Counts"))
    )


def _from_counts(names: Sequence[str], lists: list[list[float]], counts: Mapping[str, object], text: str) -> str:
    taken = [*map(sequence, sequence(counts.get("taken_for"))), *([()] * len(names))]
    scored = []
    for name, wrong, *numbers in zip(names, taken, *lists, strict=False):
        place, n = (numeric(v) for v in wrong) if len(wrong) == 2 else (None, None)
        known = place is not None and n is not None and 0 <= place < len(names)
        scored.append(_ClassLine(name, *numbers, *((names[int(place or 0)], n or 0.0) if known else ())))
    pairs = []
    for a, b, n in (cell for cell in map(sequence, sequence(counts.get("confused"))) if len(cell) == 3):
        i, j, rows = (int(numeric(v) or 0) for v in (a, b, n))
        if min(i, j) >= 0 and max(i, j) < len(names):
            pairs.append((i, j, float(rows)))
    return _in_words(names, scored, pairs, text)


def _in_words(
    names: Sequence[str], scored: list[_ClassLine], pairs: Sequence[tuple[int, int, float]], text: str
) -> str:
    """The reason why no matrix is drawn, the worst classes, the most frequent mistakes, and the scores."""
    said = f"Global test rows. {text}No confusion matrix is drawn: with {len(names)} classes it would have "
    said += f"{count(len(names) ** 2)} cells, and more than {_MOST} in a row are too small to read."
    worst = sorted(((s.f1, i) for i, s in enumerate(scored) if s.rows and s.f1 is not None))[:_WORST]
    if worst:
        said += f" Lowest F1: {', '.join(f'{names[i]} ({percent(f1)})' for f1, i in worst)}"
        alike = [i for i, s in enumerate(scored) if s.rows and s.f1 == worst[-1][0]]
        more = len({*alike} - {i for _, i in worst})
        said += f", and {more} more with the same F1 as the last of these." if more else "."
    if pairs:
        mistakes = (
            f"{names[i]} taken for {names[j]} ({count(int(n))} of {count(int(scored[i].rows))})"
            for i, j, n in pairs[:_WORST]
        )
        said += f" Most frequent mistakes: {', '.join(mistakes)}."
    listing = _listing(scored)
    return note(esc(said)) + (details(f"Scores of all {len(names)} classes", listing) if len(names) > _ALL else listing)


def _listing(scored: Sequence[_ClassLine]) -> str:
    head = ["class", "test rows", "recall", "precision", "F1", "most often taken for"]
    return table(head, [s.line() for s in scored], "Scores of each class", words=(5,))
