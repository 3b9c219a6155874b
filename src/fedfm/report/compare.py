"""Runs side by side: a table for the terminal, a page, and the section that a report with baselines has."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from fedfm.errors import InputError
from fedfm.report import frontier
from fedfm.report.page import figure, legend, note, page, save
from fedfm.report.page import table as html_table
from fedfm.report.read import RunFiles, mapping, read
from fedfm.report.svg import COLOURS, ChartBar, Format, Series, bars, lines
from fedfm.report.text import NBSP, NONE, duration, esc, finite, number, percent, plural, shorten, size, width_of


def table(run_dirs: Sequence[Path]) -> str:
    """The runs as an aligned text table, one a line, in the order given.

    Accuracies are fractions, ``spread`` is the standard deviation over the clients' accuracies. Language models have
    ``perplexity`` and, where their clients are judged by it, ``local loss`` (their mean on the clients' own test rows)
    in the place of what no run has; where a run is unfinished, ``state`` is added.

    Raises:
        InputError: no run is given, or a file is missing or not what it should be.
    """
    runs = _read(run_dirs)
    figures = _figures(runs)
    head = ["run", "method", *figures, "up", "down", "seconds"]
    rows = [
        [
            label,
            shorten(run.method, 24),
            *(number(v[i]) if name in _PLAIN else _fraction(v[i]) for name, v in figures.items()),
            size(run.traffic_total("up")),
            size(run.traffic_total("down")),
            _seconds(run.seconds),
        ]
        for i, (label, run) in enumerate(zip(labels(runs), runs, strict=True))
    ]
    if not all(run.finished for run in runs):
        head.append("state")
        rows = [[*row, _state(run)] for row, run in zip(rows, runs, strict=True)]
    rows = [[shorten(cell, 40).replace(NBSP, " ") for cell in row] for row in [head, *rows]]
    widths = [max(width_of(row[j]) for row in rows) for j in range(len(head))]
    out = []
    for i, row in enumerate(rows):
        pads = [" " * (w - width_of(c)) for w, c in zip(widths, row, strict=True)]
        out.append(
            "  ".join(c + p if j < 2 else p + c for j, (c, p) in enumerate(zip(row, pads, strict=True))).rstrip()
        )
        if i == 0:
            out.append("  ".join("-" * w for w in widths))
    return "\n".join(out) + "\n"


_PLAIN = ("perplexity", "local loss")  # numbers that are no shares


def _figures(runs: Sequence[RunFiles]) -> dict[str, list[float | None]]:
    """What the runs are judged by: column -> a value a run; of language models without what none of them has."""
    shares = {
        "accuracy": [run.value("accuracy") for run in runs],
        "global": [run.value("global_accuracy") for run in runs],
        "local": [run.value("local_accuracy") for run in runs],
        "worst client": [run.worst for run in runs],
        "spread": [run.spread for run in runs],
    }
    plain = {"perplexity": [run.value("perplexity") for run in runs]}
    if not any(v is not None for v in plain["perplexity"]):
        return shares
    plain["local loss"] = [run.value("local_loss") for run in runs]
    return {name: v for name, v in (plain | shares).items() if any(x is not None for x in v)}


def write(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page that compares runs.

    Args:
        run_dirs: the runs' directories, in the order in which they are to stand.
        out: the file to write, e.g. ``compare.html``.

    Raises:
        InputError: no run is given, a file is missing or not what it should be, or ``out`` cannot be written.
    """
    runs = _read(run_dirs)
    head = f'<p class="eyebrow">fedfm · comparison</p><h1>{plural(len(runs), "run")} compared</h1>'
    names = ", ".join(esc(n) for n in labels(runs)[:8]) + (" and others" if len(runs) > 8 else "")
    head += f'<p class="lead">{names}.</p>'
    texts = [(f"run-{i}", run, label) for i, (run, label) in enumerate(zip(runs, labels(runs), strict=True), start=1)]
    rows = [[label, run.path.resolve().name, _state(run), _plain_seed(run)] for _, run, label in texts]
    where = html_table(["run", "directory", "state", "seed"], rows, "Where the runs lie", words=(1, 2))
    parts = [("compare", "Side by side", section(runs)), ("runs", "The runs", where)]
    return save(page("Comparison · fedfm", head, parts, "Written by fedfm from the runs' own files."), Path(out))


def _incomplete(names: Sequence[str], runs: Sequence[RunFiles]) -> str:
    said = [f"{name}: {text}" for name, run in zip(names, runs, strict=True) for text in run.missing]
    items = "".join(f"<li>{esc(text)}</li>" for text in said)
    title = "Records that are not whole"
    return f'<aside aria-label="{title}"><strong>{title}</strong><ul>{items}</ul></aside>' if said else ""


def section(runs: Sequence[RunFiles]) -> str:
    """Table and plots of the runs; the first is the one that the others are held against."""
    names = labels(runs)
    alike = differences(runs)
    warning = _incomplete(names, runs)
    if alike:
        items = "".join(f"<li>{esc(d)}</li>" for d in alike)
        warning += f'<aside aria-label="Not like for like"><strong>Not like for like</strong><ul>{items}</ul></aside>'
    figures = _figures(runs)
    rows = [
        [
            name,
            *(_said(column, v[i]) for column, v in figures.items()),
            size(run.traffic_total("up")),
            size(run.traffic_total("down")),
            duration(run.seconds),
        ]
        for i, (name, run) in enumerate(zip(names, runs, strict=True))
    ]
    head = ["run", *figures, "up", "down", "time"]
    words: tuple[int, ...] = ()
    if not all(run.finished for run in runs):
        words = (len(head),)
        head.append("state")
        rows = [[*row, _state(run)] for row, run in zip(rows, runs, strict=True)]
    meanings = {
        "perplexity": "Perplexity: on the global test rows.",
        "local loss": "Local loss: mean of the clients on their own test rows.",
        "global": "Global: mean over the models on the global test rows.",
        "local": "Local: mean of the clients on their own test rows.",
        "spread": "Spread: standard deviation over the clients, in points.",
    }
    meaning = note(" ".join(text for column, text in meanings.items() if column in figures))
    return (
        warning
        + html_table(head, rows, "Runs compared", words=words)
        + meaning
        + frontier.section(runs, names)
        + _curves(runs, names)
        + _ranges(runs, names)
    )


def _said(column: str, value: float | None) -> str:
    if column in _PLAIN or value is None:
        return number(value)
    return f"{100 * value:.2f}" if column == "spread" else percent(value, 2)


def labels(runs: Sequence[RunFiles]) -> list[str]:
    """A short name for each run that no other has: its method, its name, its directory or its path, whichever does."""
    for of in (lambda r: r.method, lambda r: r.name, lambda r: r.path.resolve().name, lambda r: str(r.path)):
        out = [of(run) for run in runs]
        if len(set(out)) == len(out):
            break
    return out


def differences(runs: Sequence[RunFiles]) -> list[str]:
    """In what the runs differ that makes their numbers hard to compare."""
    first, out = runs[0], other_data(runs)
    names = labels(runs)

    def unlike(what: str, of: list[object]) -> None:
        if others := _unlike(names, of):
            out.append(_sentence(what, others, names[0]))

    unlike("The model (fingerprint)", [mapping(run.manifest.get("fingerprints")).get("model") for run in runs])
    told = _not_private(names, runs)
    if others := _unlike(list(told), [mapping(run.manifest.get("split")).get("clients") for run in told.values()]):
        out.append(_sentence("The split among clients", others, next(iter(told))))
    unlike("The seed", [mapping(run.experiment.get("run")).get("seed") for run in runs])
    unlike("The attack", [run.experiment.get("attack") for run in runs])
    unlike("The aggregation", [run.experiment.get("aggregation") or {"name": "mean"} for run in runs])
    unfinished = [n for n, run in zip(names, runs, strict=True) if not run.finished]
    if unfinished:
        out.append(f"Unfinished: {', '.join(unfinished)}.")
    if len({run.done_rounds for run in runs}) > 1:
        out.append(f"The number of rounds differs ({first.done_rounds} for {names[0]}).")
    return out


def other_data(runs: Sequence[RunFiles]) -> list[str]:
    """Sentences where the figures are not of the same data, by the fingerprints of all rows, or where nobody can tell:
    under [privacy] a fingerprint is keyed, with another key a run.
    """
    names = labels(runs)
    out, told = [], _not_private(names, runs)
    if others := _unlike(list(told), [mapping(run.manifest.get("fingerprints")).get("data") for run in told.values()]):
        first = next(iter(told))
        out.append(
            f"The figures are of different data: the rows (fingerprint) of {', '.join(others)} are not {first}'s."
        )
    if (keyed := [n for n in names if n not in told]) and len(names) > 1:
        out.append(
            f"Of {', '.join(keyed)} nobody can tell whether the data are the same: [privacy] keys the fingerprint."
        )
    return out


def _not_private(names: Sequence[str], runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """The runs whose manifests tell of their rows."""
    return {n: run for n, run in zip(names, runs, strict=True) if not run.experiment.get("privacy")}


def _sentence(what: str, others: Sequence[str], first: str) -> str:
    return f"{what} of {', '.join(others)} {'is' if len(others) == 1 else 'are'} not that of {first}."


def _unlike(names: Sequence[str], of: Sequence[object]) -> list[str]:
    """Those whose value is not the first's."""
    keys = [json.dumps(v, sort_keys=True, default=str) for v in of]
    return [n for n, k in zip(names, keys, strict=True) if k != keys[0]]


def _curves(runs: Sequence[RunFiles], names: list[str]) -> str:
    found = {k: [[r.values.get(k) is not None for r in run.rounds] for run in runs] for k in ("perplexity", "accuracy")}
    # Clients' own models are judged on the global test rows at the end alone: their perplexity is no line.
    language = all(sum(run) > 1 for run in found["perplexity"])
    accurate = any(any(run) for run in found["accuracy"])
    judged = any(r.values.get("local_loss") is not None for run in runs for r in run.rounds)
    key = "perplexity" if language else "accuracy" if accurate else "local_loss" if judged else "perplexity"
    shown: Format = percent if key == "accuracy" else number
    series = [
        Series(name, [(float(r.number), r.values.get(key)) for r in run.rounds], i % COLOURS + 1)
        for i, (run, name) in enumerate(zip(runs, names, strict=True))
        if run.rounds
    ]
    if not series:
        return ""
    ends = [shown(s.points[-1][1]) for s in series]
    label = (
        f"Lines of {key.replace('_', ' ')} per round. Last: "
        + "; ".join(f"{s.name} {e}" for s, e in zip(series, ends, strict=True))
        + "."
    )
    within = (0.0, 1.0) if key == "accuracy" else None
    draw = figure(lambda w: lines(w, series, label, shown, within=within))
    return f"<h3>{key.replace('_', ' ').capitalize()} by round</h3>" + legend(series, ends) + draw


def _ranges(runs: Sequence[RunFiles], names: list[str]) -> str:
    rows, spans = [], []
    for run, name in zip(runs, names, strict=True):
        seen, mean = run.measured, run.value("local_accuracy")
        if not seen:
            continue
        mean = mean if finite(mean) else math.fsum(seen) / len(seen)
        title = f"{name}: worst {percent(min(seen))}, mean {percent(mean)}, best {percent(max(seen))}"
        rows.append(ChartBar(name, mean, percent(mean), title))
        spans.append((min(seen), max(seen)))
    if not rows:
        return ""
    label = (
        "Mean of the clients, on the range from the worst to the best client. " + "; ".join(r.title for r in rows) + "."
    )
    draw = figure(lambda w: bars(w, rows, label, spans=spans))
    said = note(
        "A dot is the mean of the clients, the bar behind it runs from the worst to the best client; from 0 to 100 %."
    )
    return "<h3>Clients of each run</h3>" + said + draw


def _read(run_dirs: Sequence[Path]) -> list[RunFiles]:
    if not run_dirs:
        raise InputError("compare: no run given; name the directories of one or more runs")
    return [read(Path(d), messages=False) for d in run_dirs]


def _fraction(value: float | None) -> str:
    return f"{value:.4f}" if value is not None and math.isfinite(value) else number(value)


def _seconds(value: float | None) -> str:
    return f"{value:.1f}" if value is not None and math.isfinite(value) else number(value)


def _state(run: RunFiles) -> str:
    if run.finished:
        return "finished"
    of = "" if run.planned_rounds is None else f" of {run.planned_rounds}"
    return f"unfinished: {run.done_rounds}{of} rounds"


def _plain_seed(run: RunFiles) -> str:
    seed = mapping(run.experiment.get("run")).get("seed")
    return NONE if seed is None else str(seed)
