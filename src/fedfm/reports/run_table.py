"""Write runs as a text table for the terminal, one line per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.errors import InputError
from fedfm.reports.basis import basis, meaning
from fedfm.reports.read import BASE_AND_NEW, RunFiles, read
from fedfm.reports.text import NBSP, finite, number, shorten, size, width_of

PLAIN = ("perplexity", "loss", "local loss")  # metrics that are not fractions


def table(run_dirs: Sequence[Path]) -> str:
    """The runs as an aligned text table, one line per run, in the given order.

    Accuracies are fractions. If ``accuracy`` is measured on all test rows in some runs and on each client's own rows in
    others, the column is left out, and a last line names the score by which runs are compared. ``spread`` is the
    standard deviation of the clients' accuracies. For language models the table has ``perplexity`` and ``local loss``
    (mean over clients, on their own test rows). If no run has an accuracy, the table has ``loss``. Columns that all
    runs lack are left out. If a run is unfinished, there is a column ``state``.

    Raises:
        InputError: no run is given, or a file is missing or invalid.
    """
    runs = read_runs(run_dirs)

    def show(column: str, value: float | None) -> str:
        return number(value) if column in PLAIN or not finite(value) else f"{value:.4f}"

    def seconds(value: float | None) -> str:
        return f"{value:.1f}" if finite(value) else number(value)

    head, rows = listed_runs(runs, "seconds", show, seconds)
    methods = ["method", *(shorten(run.method, 24) for run in runs)]
    rows = [[row[0], method, *row[1:]] for row, method in zip([head, *rows], methods, strict=True)]
    rows = [[shorten(cell, 40).replace(NBSP, " ") for cell in row] for row in rows]
    widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
    out = []
    for row in rows:
        pads = [" " * (w - width_of(c)) for w, c in zip(widths, row, strict=True)]
        cells = (c + p if j < 2 else p + c for j, (c, p) in enumerate(zip(row, pads, strict=True)))
        out.append("  ".join(cells).rstrip())
    out.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join([*out, *compared_by(runs)]) + "\n"


def compared_by(runs: Sequence[RunFiles]) -> list[str]:
    """Sentences about accuracies that are measured on different rows, and about scores of a sample of the clients."""
    by, names = basis(runs), labels(runs)
    sampled = [f"local scores of {n} are of {run.sample}" for n, run in zip(names, runs, strict=True) if run.sample]
    if not by.mixed:
        return sampled
    own = [name for name, run in zip(names, runs, strict=True) if meaning(run) == LOCAL_ACCURACY]
    return [
        f"compared by the accuracy {by.rows}; the accuracy of {', '.join(own)} is measured on each client's own rows",
        *sampled,
    ]


def listed_runs(
    runs: Sequence[RunFiles],
    time: str,
    show: Callable[[str, float | None], str],
    seconds: Callable[[float | None], str],
) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of a table: each run's label, metrics, traffic and time, and its state if some run is unfinished."""
    figures = _figures(runs)
    head, rows = ["run", *figures, "up", "down", time], []
    for i, (label, run) in enumerate(zip(labels(runs), runs, strict=True)):
        values = [show(column, v[i]) for column, v in figures.items()]
        up, down = (size(run.traffic_total(way)) for way in ("up", "down"))
        rows.append([label, *values, up, down, seconds(run.seconds)])
    if not all(run.is_finished for run in runs):
        head.append("state")
        rows = [[*row, state_of(run)] for row, run in zip(rows, runs, strict=True)]
    return head, rows


def _figures(runs: Sequence[RunFiles]) -> dict[str, list[float | None]]:
    """One value per run for each column of metrics; for language models, columns that all runs lack are left out."""
    shares = {} if basis(runs).mixed else {"accuracy": [run.value("accuracy") for run in runs]}
    shares |= {
        "global": [run.value(GLOBAL_ACCURACY) for run in runs],
        "local": [run.value(LOCAL_ACCURACY) for run in runs],
        "worst client": [run.worst for run in runs],
        "spread": [run.spread for run in runs],
    }
    of_names = zip(("base", "new", "harmonic mean"), BASE_AND_NEW, strict=True)
    judged = {column: [run.value(key) for run in runs] for column, key in of_names}
    shares |= {column: values for column, values in judged.items() if any(v is not None for v in values)}
    plain = {"perplexity": [run.value("perplexity") for run in runs]}
    if not any(v is not None for values in shares.values() for v in values):  # no accuracy is defined
        plain["loss"] = [run.value("loss") for run in runs]
    if not any(v is not None for values in plain.values() for v in values):
        return shares
    plain["local loss"] = [run.value("local_loss") for run in runs]
    return {name: v for name, v in (plain | shares).items() if any(x is not None for x in v)}


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """Short unique names of the runs: their methods if these all differ, else names, else directories, else paths."""
    for of in (lambda r: r.method, lambda r: r.name, lambda r: r.path.resolve().name, lambda r: str(r.path)):
        out = [of(run) for run in runs]
        if len(set(out)) == len(out):
            break
    return out


def read_runs(run_dirs: Sequence[Path]) -> list[RunFiles]:
    """The records of these runs, without their messages.

    Raises:
        InputError: no run is given, or a file is missing or invalid.
    """
    if not run_dirs:
        raise InputError("compare: no run given; name the directories of one or more runs")
    return [read(Path(d), messages=False) for d in run_dirs]


def state_of(run: RunFiles) -> str:
    """The state of a run in words: finished, or the number of its rounds so far."""
    if run.is_finished:
        return "finished"
    of = "" if run.planned_rounds is None else f" of {run.planned_rounds}"
    return f"unfinished: {run.done_rounds}{of} rounds"
