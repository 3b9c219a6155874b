"""Compare runs, on a page of its own and in a section of a report with baselines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fedfm.core import storage
from fedfm.core.metric_names import ACCURACY, GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports.basis import ROWS, basis, unlike_settings
from fedfm.reports.page import aside, figure, legend, note, page, save
from fedfm.reports.page import table as html_table
from fedfm.reports.read import RunFiles, mapping
from fedfm.reports.run_table import PLAIN, compared_by, listed_runs, read_runs, state_of
from fedfm.reports.run_table import labels as labels
from fedfm.reports.run_table import table as table
from fedfm.reports.svg import COLOURS, ChartBar, Format, Series, bars, lines
from fedfm.reports.text import NONE, duration, esc, finite, number, percent, plural, shorten

_TITLE = "Comparison · fedfm"  # title of the page


def write(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write one self-contained page that compares runs.

    Args:
        run_dirs: the runs' directories, in the order of the page.
        out: the file to write, e.g. ``compare.html``; an existing file must be an earlier comparison.

    Raises:
        InputError: no run is given, a run's file is missing or invalid, or ``out`` is another file or not writable.
    """
    storage.refuse_others(Path(out), f"<title>{_TITLE}")
    runs = read_runs(run_dirs)
    names = labels(runs)
    head = f'<p class="eyebrow">fedfm · comparison</p><h1>{plural(len(runs), "run")} compared</h1>'
    some = ", ".join(esc(n) for n in names[:8]) + (" and others" if len(runs) > 8 else "")
    head += f'<p class="lead">{some}.</p>'
    seeds = [mapping(run.experiment.get("run")).get("seed") for run in runs]
    rows = [
        [name, run.path.resolve().name, state_of(run), NONE if seed is None else str(seed)]
        for name, run, seed in zip(names, runs, seeds, strict=True)
    ]
    where = html_table(["run", "directory", "state", "seed"], rows, "Directories of the runs", words=(1, 2))
    parts = [("compare", "Side by side", section(runs)), ("runs", "The runs", where)]
    return save(page(_TITLE, head, parts, "Written by fedfm from the runs' own files."), Path(out), chosen=True)


def section(runs: Sequence[RunFiles]) -> str:
    """Tables and plots of the runs. Notes on differences compare all other runs with the first run."""
    from fedfm.reports import frontier

    names = labels(runs)
    incomplete = [f"{name}: {text}" for name, run in zip(names, runs, strict=True) for text in run.missing]
    warning = aside("Incomplete records", incomplete) + aside("Differences that hinder comparison", differences(runs))

    def show(column: str, value: float | None) -> str:
        if column in PLAIN or value is None:
            return number(value)
        return f"{100 * value:.2f}" if column == "spread" else percent(value, 2)

    head, rows = listed_runs(runs, "time", show, duration)
    words = (len(head) - 1,) if head[-1] == "state" else ()
    meanings = {
        "perplexity": "Perplexity: on the global test rows.",
        "local loss": "Local loss: mean of the clients on their own test rows.",
        "global": "Global: mean over the models on the global test rows.",
        "local": "Local: mean of the clients on their own test rows.",
        "base": "Base, new: on the global test rows of the base or the new classes, where a model chooses only among "
        "these classes; mean over the models.",
        "spread": "Spread: standard deviation over the clients, in points.",
    }
    said = [text for column, text in meanings.items() if column in head]
    said += [f"{text[0].upper()}{text[1:]}." for text in compared_by(runs)]
    return (
        warning
        + html_table(head, rows, "Runs compared", words=words)
        + note(" ".join(said))
        + _settings(runs, names)
        + frontier.section(runs, names)
        + _curves(runs, names)
        + _ranges(runs, names)
    )


def _settings(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """A table of the settings that are not the same in all runs."""
    unlike = unlike_settings([run.experiment for run in runs])
    unlike.pop("name", None)
    if not unlike:
        return ""

    def cell(value: object) -> str:
        return NONE if value is None else shorten(value if isinstance(value, str) else json.dumps(value), 40)

    rows = [[key, *map(cell, values)] for key, values in unlike.items()]
    words = tuple(range(1, len(names) + 1))
    return "<h3>What differs in the settings</h3>" + html_table(
        ["key", *names], rows, "Settings that differ", words=words
    )


def differences(runs: Sequence[RunFiles]) -> list[str]:
    """Sentences about differences between the runs that make their scores hard to compare."""
    out, names = other_data(runs), labels(runs)
    every = dict(zip(names, runs, strict=True))

    def unlike(what: str, runs: Mapping[str, RunFiles], value: Callable[[RunFiles], object]) -> None:
        if others := _unlike(runs, value):
            verb = "differs" if len(others) == 1 else "differ"
            out.append(f"{what}: {', '.join(others)} {verb} from {next(iter(runs))}.")

    unlike("The model (fingerprint)", every, lambda r: mapping(r.manifest.get("fingerprints")).get("model"))
    unlike("The split among clients", _not_private(runs), _split_of)
    unlike("The seed", every, lambda r: mapping(r.experiment.get("run")).get("seed"))
    unlike("The attack", every, lambda r: r.experiment.get("attack"))
    unlike("The aggregation", every, lambda r: r.experiment.get("aggregation") or {"name": "mean"})
    unfinished = [n for n, run in every.items() if not run.is_finished]
    if unfinished:
        out.append(f"Unfinished: {', '.join(unfinished)}.")
    if len({run.done_rounds for run in runs}) > 1:
        out.append(f"The number of rounds differs ({runs[0].done_rounds} for {names[0]}).")
    return out


def _split_of(run: RunFiles) -> object:
    """The counts of all clients; of very many clients the fingerprint of the split."""
    return mapping(run.manifest.get("split")).get("clients") or mapping(run.manifest.get("fingerprints")).get(
        "partition"
    )


def other_data(runs: Sequence[RunFiles]) -> list[str]:
    """Sentences about runs whose fingerprint of the rows differs from the first run's, or cannot be compared.

    Under [privacy] each run computes its fingerprint with a key of its own, so no two fingerprints can be compared.
    """
    out, public = [], _not_private(runs)
    if others := _unlike(public, lambda run: mapping(run.manifest.get("fingerprints")).get("data")):
        text = f"The scores are of different data: the rows (fingerprint) of {', '.join(others)} are not "
        out.append(f"{text}{next(iter(public))}'s.")
    if (keyed := [n for n in labels(runs) if n not in public]) and len(runs) > 1:
        out.append(
            f"The data of {', '.join(keyed)} cannot be compared: under [privacy] each run computes the fingerprint "
            f"with its own key."
        )
    return out


def _not_private(runs: Sequence[RunFiles]) -> dict[str, RunFiles]:
    """The runs whose manifests describe their rows, by label."""
    return {n: run for n, run in zip(labels(runs), runs, strict=True) if not run.experiment.get("privacy")}


def _unlike(runs: Mapping[str, RunFiles], value: Callable[[RunFiles], object]) -> list[str]:
    """Labels of the runs whose value differs from the first run's."""
    keys = {name: json.dumps(value(run), sort_keys=True, default=str) for name, run in runs.items()}
    return [name for name, key in keys.items() if key != next(iter(keys.values()))]


def _curves(runs: Sequence[RunFiles], names: list[str]) -> str:
    key = _curve_key(runs)
    shown: Format = number if key in ("perplexity", "local_loss") else percent
    last = max((float(r.number) for run in runs for r in run.rounds), default=0.0)
    series = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        points = [(float(r.number), r.values.get(key)) for r in run.rounds]
        once = sum(value is not None for _, value in points) == 1 and points[-1][1] is not None
        if (run.done_rounds <= 1 or once) and last > 1 and points:  # a single value is drawn as a level line
            points = [(0.0, points[-1][1]), (last, points[-1][1])]
        # Missing values are dropped, so that a run that was evaluated only in some rounds is drawn as one line.
        points = [(x, y) for x, y in points if y is not None] or points
        if points:
            series.append(Series(name, points, i % COLOURS + 1))
    if not series:
        return ""
    ends = [shown(s.points[-1][1]) for s in series]
    name = key.split("_")[-1] if key in ROWS else key.replace("_", " ")
    ended = "; ".join(f"{s.name} {e}" for s, e in zip(series, ends, strict=True))
    label = f"Lines of {name} per round. Last: {ended}."
    within = (0.0, 1.0) if key in ROWS else None
    draw = figure(lambda w: lines(w, series, label, shown, within=within))
    text = note(f"{name.capitalize()} {ROWS[key]}.") if key in (GLOBAL_ACCURACY, LOCAL_ACCURACY) else ""
    return f"<h3>{name.capitalize()} by round</h3>" + text + legend(series, ends) + draw


def _curve_key(runs: Sequence[RunFiles]) -> str:
    """The metric that the lines show: if possible one that all runs measure on the same rows and in each round."""

    def has_curve(key: str) -> bool:
        counts = (sum(r.values.get(key) is not None for r in run.rounds) for run in runs)
        return all(count > min(run.done_rounds, 1) for count, run in zip(counts, runs, strict=True))

    # Clients' own models are evaluated on the global test rows only at the end; a single value gives no line.
    if all(sum(r.values.get("perplexity") is not None for r in run.rounds) > 1 for run in runs):
        return "perplexity"
    by = basis(runs)
    keys = [by.key, LOCAL_ACCURACY, GLOBAL_ACCURACY] if by.mixed else [ACCURACY]
    if found := next(filter(has_curve, keys), None):
        return found
    # A run that was evaluated only at its end can be a level line if all runs were measured on the same rows.
    if by.mixed and all(run.rounds and run.rounds[-1].values.get(by.key) is not None for run in runs):
        return by.key
    rounds = [r for run in runs for r in run.rounds]
    some = (k for k in (ACCURACY, "local_loss") if any(r.values.get(k) is not None for r in rounds))
    return next(some, "perplexity")


def _ranges(runs: Sequence[RunFiles], names: list[str]) -> str:
    rows, spans = [], []
    for run, name in zip(runs, names, strict=True):
        accuracies, mean = run.finite_accuracies, run.value(LOCAL_ACCURACY)
        if not accuracies:
            continue
        mean = mean if finite(mean) else math.fsum(accuracies) / len(accuracies)
        title = f"{name}: worst {percent(min(accuracies))}, mean {percent(mean)}, best {percent(max(accuracies))}"
        rows.append(ChartBar(name, mean, percent(mean), title))
        spans.append((min(accuracies), max(accuracies)))
    if not rows:
        return ""
    text = "A dot is the mean of the clients; the bar runs from the worst to the best client, on a scale of 0 to 100 %."
    label = f"{text} {'; '.join(r.title for r in rows)}."
    return f"<h3>Clients of each run</h3>{note(text)}" + figure(lambda w: bars(w, rows, label, spans=spans))
