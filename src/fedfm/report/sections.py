"""The sections on what was measured: per round, per client, the split, time, who was left out. Each is run -> HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

from fedfm.report.page import details, figure, legend, note, swatches, table
from fedfm.report.read import Round, RunFiles, mapping, numeric, sequence
from fedfm.report.svg import COLOURS, ChartBar, Format, Series, bars, heat, lines
from fedfm.report.text import count, duration, esc, finite, number, numbers, percent, plural, sound

T = TypeVar("T")
MOST_BARS = 40  # clients drawn one by one; more are shown in groups of neighbours
MOST_COLUMNS = 100
MOST_CELLS = 20_000  # of the table of class counts


def curves(run: RunFiles) -> str:
    """Accuracy per round where there is one, else perplexity, else loss; then the losses."""
    rounds = run.rounds
    if not rounds:
        return note("No round has been committed yet.")
    out = []
    if _any(rounds, "global_accuracy") or _any(rounds, "local_accuracy") or _any(rounds, "accuracy"):
        out.append(_accuracy(rounds))
    judged = [r for r in rounds if r.values.get("perplexity") is not None]
    if len(judged) == 1 and len(rounds) > 1:  # a model a client: they are judged on the global test rows at the end
        told = number(judged[0].values["perplexity"])
        out.append(note(f"Perplexity on the global test rows: {told}, judged in round {judged[0].number} alone."))
    elif judged:
        out.append(
            "<h3>Perplexity</h3>" * bool(out) + _plot(rounds, {"perplexity": "perplexity, global test rows"}, number)
        )
    losses = {"loss": "loss, global test rows", "train_loss": "training loss, mean of the cohort"}
    if not _any(rounds, "accuracy"):
        losses["local_loss"] = "loss, mean of the clients on their own test rows"
    losses = {k: v for k, v in losses.items() if _any(rounds, k)}
    if losses:
        out.append("<h3>Loss</h3>" * bool(out) + _plot(rounds, losses, number))
    if not out:
        out.append(note("Neither accuracy, perplexity nor loss is defined for this run."))
    return "".join(out) + _numbers(rounds)


def _accuracy(rounds: tuple[Round, ...]) -> str:
    names = {"global_accuracy": "on the global test rows", "local_accuracy": "mean of the clients"}
    if not any(_any(rounds, k) for k in names):
        names = {"accuracy": "accuracy"}
    band = []
    for r in rounds:
        seen = numbers(r.clients.values())
        band.append((float(r.number), min(seen, default=None), max(seen, default=None)))
    shown = any(low is not None for _, low, _ in band)
    return _plot(
        rounds, {k: v for k, v in names.items() if _any(rounds, k)}, percent, band if shown else [], (0.0, 1.0)
    )


def _plot(
    rounds: tuple[Round, ...],
    names: dict[str, str],
    form: Format,
    band: list[tuple[float, float | None, float | None]] | None = None,
    within: tuple[float, float] | None = None,
) -> str:
    series = [
        Series(name, [(float(r.number), r.values.get(key)) for r in rounds], i)
        for i, (key, name) in enumerate(names.items(), start=1)
    ]
    ends = [form(s.points[-1][1]) for s in series]
    said = "; ".join(f"{s.name}: {form(s.points[0][1])} to {end}" for s, end in zip(series, ends, strict=True))
    label = f"Lines over rounds {rounds[0].number} to {rounds[-1].number}. {said}."
    draw = figure(lambda w: lines(w, series, label, form, band or [], within))
    broken = sum(1 for s in series for _, y in s.points if y is not None and not finite(y))
    gap = (
        note(f"{plural(broken, 'value')} that {'is' if broken == 1 else 'are'} not finite left out.") if broken else ""
    )
    return legend(series, ends, "worst to best client" if band else "") + draw + gap


def _any(rounds: tuple[Round, ...], key: str) -> bool:
    return any(r.values.get(key) is not None for r in rounds)


def _numbers(rounds: tuple[Round, ...]) -> str:
    keys = [k for k in rounds[0].values if _any(rounds, k)]
    shape: dict[str, Format] = {k: percent if "accuracy" in k or k == "macro_f1" else number for k in keys}
    head = ["round", *(k.replace("_", " ") for k in keys), "time"]
    rows = [[str(r.number), *(shape[k](r.values[k]) for k in keys), duration(r.seconds)] for r in rounds]
    return details("All numbers per round", table(head, rows, "Metrics per round"))


def clients(run: RunFiles) -> str:
    """Each client's accuracy at the end, or loss where no accuracy is defined, best first; those without test rows
    last.
    """
    final = run.client_accuracy
    if numbers(run.client_loss.values()):
        return _losses(run, run.client_loss)
    if not final:
        return note("No accuracy per client was measured.")
    if run.experiment.get("privacy") and not run.measured:
        return note("Under [privacy] no client is asked for scores: the ledger does not cover them.")
    if mapping(run.experiment.get("method")).get("counts") == "withheld" and not run.measured:
        return note("No client is asked for scores, which would tell how many rows it has: counts are withheld.")
    order = sorted(final, key=lambda c: (-sound(final[c], -2.0), c))
    rows = [ChartBar(c, final[c], "no test rows" if final[c] is None else percent(final[c])) for c in order]
    silent = sum(1 for v in final.values() if v is None)
    seen = run.measured
    said = f"{plural(len(final), 'client')}, each model on the client's own test rows"
    mean = statistics.fmean(seen) if seen else None
    if seen:
        said += f": mean {percent(mean)}, worst {percent(min(seen))}, best {percent(max(seen))}, standard deviation "
        said += f"{100 * statistics.pstdev(seen):.1f} points"
    if silent:
        said += f". {count(silent)} without test rows, left out of means"
    drawn = rows if len(rows) <= MOST_BARS else _grouped([r for r in rows if finite(r.value)])
    many = _GATHERED if drawn is not rows else ""
    line = (mean, f"mean {percent(mean)}") if mean is not None else None
    body = figure(lambda w: bars(w, drawn, f"Bars. {said}.", 1.0, line))
    listing = table(["client", "accuracy"], [[r.label, r.text] for r in rows], "Accuracy per client")
    both = _before_and_after(run, order)
    return note(f"{esc(said)}. {many}") + body + (both or details("All clients", listing))


def _losses(run: RunFiles, final: Mapping[str, float | None]) -> str:
    order = sorted(final, key=lambda c: (sound(final[c], math.inf), c))
    rows = [ChartBar(c, final[c], "no test rows" if final[c] is None else number(final[c])) for c in order]
    seen = numbers(final.values())
    mean, silent = statistics.fmean(seen), sum(1 for v in final.values() if v is None)
    said = (
        f"{plural(len(final), 'client')}, each model on the client's own test rows, of which no accuracy is defined: "
    )
    said += f"mean loss {number(mean)}, worst {number(max(seen))}, best {number(min(seen))}; less is better"
    said += f". {count(silent)} without test rows, left out of means" if silent else ""
    drawn = rows if len(rows) <= MOST_BARS else _grouped([r for r in rows if finite(r.value)], number)
    body = figure(lambda w: bars(w, drawn, f"Bars. {said}.", max(seen), (mean, f"mean {number(mean)}")))
    body += details("All clients", table(["client", "loss"], [[r.label, r.text] for r in rows], "Loss per client"))
    told = mapping(mapping(run.result.get("details")).get("server_client_loss"))
    before = {str(c): numeric(v) for c, v in told.items()}
    if numbers(before.values()):
        pairs = [(c, before.get(c), final[c]) for c in order]
        gains = [b - a for _, a, b in pairs if a is not None and b is not None and finite(a) and finite(b)]
        head = ["client", "theta_bar_i (server's)", "theta_i (after the pass)"]
        both = table(head, [[c, number(a), number(b)] for c, a, b in pairs], "Losses before and after")
        moved = f"the mean loss by {statistics.fmean(gains):+.3f}" if gains else ""
        body += _ABOUT_BOTH + note(esc(_said_of_both(moved))) + both
    return note(f"{esc(said)}. {_GATHERED if drawn is not rows else ''}") + body


_GATHERED = "Sorted and gathered into groups of neighbours; a bar is a group's mean."
_ABOUT_BOTH = "<h3>Before and after the last local pass</h3>"


def _said_of_both(moved: str) -> str:
    said = "theta_bar_i is what the server had made for client i, theta_i what the client made of it in its last local "
    said += "pass; both on the client's own test rows. Read the first column for what learning from others gave: the "
    return f"{said}last local pass alone can explain a gain" + (f" (here it moves {moved})." if moved else ".")


def _before_and_after(run: RunFiles, order: Sequence[str]) -> str:
    """What the server had for each client, and the client's own model after its last local pass."""
    told = mapping(run.result.get("details"))
    before = {str(c): numeric(v) for c, v in mapping(told.get("server_client_accuracy")).items()}
    if not before:
        return ""
    rows, gains = [], []
    for c in order:
        a, b = before.get(c), run.client_accuracy[c]
        gain = b - a if a is not None and b is not None and finite(a) and finite(b) else None
        gains += [] if gain is None else [gain]
        rows.append([c, percent(a), percent(b), "" if gain is None else f"{100 * gain:+.1f}"])
    mean = statistics.fmean(gains) if gains else None
    moved = f"the mean by {100 * mean:+.1f} points" if mean is not None else ""
    head = ["client", "theta_bar_i (server's)", "theta_i (after the pass)", "points"]
    return _ABOUT_BOTH + note(esc(_said_of_both(moved))) + table(head, rows, "Before and after")


def _grouped(rows: list[ChartBar], form: Format = percent) -> list[ChartBar]:
    parts = _chunks(rows, 25)
    means = [statistics.fmean(r.value or 0.0 for r in part) for part in parts]
    names = [f"{a + 1} to {a + len(p)}" for a, p in zip(_starts(parts), parts, strict=True)]
    return [
        ChartBar(n, m, form(m), f"Places {n}: {form(p[-1].value)} to {form(p[0].value)}")
        for n, m, p in zip(names, means, parts, strict=True)
    ]


def _chunks(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """At most so many runs of neighbours, equal in length within one."""
    n = min(most, len(items))
    return [items[len(items) * i // n : len(items) * (i + 1) // n] for i in range(n)]


def _starts(parts: Sequence[Sequence[T]]) -> list[int]:
    return [sum(map(len, parts[:i])) for i in range(len(parts))]


def split(run: RunFiles) -> str:
    """How many training rows of each class each client has."""
    part = mapping(run.manifest.get("split"))
    table_ = {
        str(c): {k: _counts(v) for k, v in mapping(rows).items()} for c, rows in mapping(part.get("clients")).items()
    }
    said_ = [*sequence(part.get("notices")), *sequence(run.manifest.get("notices"))]
    notices = "".join(f"<li>{esc(n)}</li>" for n in dict.fromkeys(map(str, said_)))
    notices = f'<ul class="plain">{notices}</ul>' if notices else ""
    if (kept := part.get("counts")) is not None:
        said = "Under [privacy] the exact numbers of rows by client and class are no part of this report: "
        return note(f"{esc(said)}<code>{esc(kept)}</code> has them.") + notices
    if not table_:
        return note("The manifest does not say how the rows were split.") + notices
    classes = [str(c) for c in sequence(part.get("classes"))]
    train = {c: rows.get("train", []) for c, rows in table_.items()}
    widest = max(len(v) for v in train.values())
    classes += [f"class {j}" for j in range(len(classes), widest)]
    train = {c: v + [0] * (len(classes) - len(v)) for c, v in train.items()}
    sizes = [sum(v) for v in train.values()]
    said = f"{plural(sum(sizes), 'training row')} at {plural(len(train), 'client')}: {count(min(sizes))} to "
    said += f"{count(max(sizes))} each, median {number(statistics.median(sizes))}"
    if len(classes) > 1:
        kinds = [sum(1 for n in v if n) for v in train.values()]
        said += f"; {min(kinds)} to {max(kinds)} of {plural(len(classes), 'class', 'classes')} at a client"
    if len(classes) <= COLOURS and len(train) <= MOST_BARS:
        draw = _stacked(train, classes, f"Stacked bars of training rows per class. {said}.")
    else:
        draw = _heat(train, classes, f"Heat map of the share of each class in a client's training rows. {said}.")
    return note(f"{esc(said)}.") + draw + notices + _counts_table(table_, train, classes)


def _stacked(train: dict[str, list[int]], classes: list[str], label: str) -> str:
    rows = [
        ChartBar(
            c, sum(v), count(sum(v)), parts=[(n, f"{c}, {k}: {count(n)}") for n, k in zip(v, classes, strict=True)]
        )
        for c, v in train.items()
    ]
    high = max(r.value or 0 for r in rows)
    return (swatches(classes) if len(classes) > 1 else "") + figure(lambda w: bars(w, rows, label, float(high)))


def _heat(train: dict[str, list[int]], classes: list[str], label: str) -> str:
    names, groups = classes, _chunks(range(len(classes)), MOST_COLUMNS)
    if len(classes) > MOST_COLUMNS:
        names = [f"{classes[g[0]]} to {classes[g[-1]]}" if len(g) > 1 else classes[g[0]] for g in groups]
    shares = {c: [sum(v[j] for j in g) / max(sum(v), 1) for g in groups] for c, v in train.items()}
    rows = [(c, s, count(sum(train[c]))) for c, s in shares.items()]
    many = ""
    if len(rows) > MOST_BARS:  # neighbours in this order have the same largest class, so that a mean keeps the pattern
        order = sorted(
            rows, key=lambda r: (max(range(len(r[1])), key=r[1].__getitem__, default=0), -max(r[1], default=0))
        )
        rows = []
        for part in _chunks(order, MOST_BARS):
            mean = [statistics.fmean(column) for column in zip(*(s for _, s, _ in part), strict=True)]
            rows.append((plural(len(part), "client"), mean, count(sum(sum(train[c]) for c, _, _ in part))))
        many = " Clients are ordered by their largest class and gathered; a row is a group's mean share."
    high = max((max(s, default=0.0) for _, s, _ in rows), default=0.0)
    key = note(
        f'Share of a client\'s rows: 0 <span class="ramp"></span> {percent(high, 0)}. Right: training rows.{many}'
    )
    return key + figure(lambda w: heat(w, rows, names, label, high))


def _counts_table(table_: dict[str, dict[str, list[int]]], train: dict[str, list[int]], classes: list[str]) -> str:
    cells = len(train) * len(classes)
    head = ["client", "train", "val", "test", "classes", *(classes if cells <= MOST_CELLS else [])]
    rows = []
    for c, v in train.items():
        sums = [count(sum(table_[c].get(k, []))) for k in ("train", "val", "test")]
        rows.append([c, *sums, str(sum(1 for n in v if n)), *(map(count, v) if cells <= MOST_CELLS else ())])
    end = (
        "" if cells <= MOST_CELLS else note("Counts per class of so many clients stand in <code>manifest.json</code>.")
    )
    return details("All counts (training rows per class)", table(head, rows, "Rows per client and class") + end)


def _counts(value: object) -> list[int]:
    """Rows of each class, from a list, from {"rows", "by_class"}, or from a number of rows."""
    if isinstance(value, dict):
        value = value.get("by_class") or [value.get("rows")]
    items = value if isinstance(value, list) else [value]
    return [max(int(sound(numeric(i), 0.0)), 0) for i in items]


def time(run: RunFiles) -> str:
    """Seconds of each round of training; round 0 only evaluates, so it stands in words."""
    timed = [(float(r.number), r.seconds) for r in run.rounds if r.number > 0]
    known = numbers(s for _, s in timed)
    start = numbers(r.seconds for r in run.rounds if r.number == 0)
    before = f" The evaluation before training took {duration(start[0])}." if start else ""
    if not known:
        return note(f"No round of training has been timed yet.{before}")
    said = (
        f"{plural(len(known), 'round')}: median {duration(statistics.median(known))}, longest {duration(max(known))}, "
    )
    said += f"together {duration(sum(known))}."
    line = [Series("seconds", timed)]
    label = f"Line of seconds per round. {said}"
    return note(f"{esc(said)}{before}") + figure(lambda w: lines(w, line, label, duration, height=190, from_zero=True))


def excluded(run: RunFiles) -> str:
    """Who was left out of which round, and why."""
    if not run.excluded:
        return note("None: whoever was asked, answered well.")
    rows = [[str(t), c, code, reason] for t, c, code, reason in run.excluded]
    who = len({c for _, c, _, _ in run.excluded})
    said = note(f"{plural(len(rows), 'exclusion')} of {plural(who, 'client')}; the round went on without them.")
    return said + table(["round", "client", "code", "reason"], rows, "Excluded clients", words=(1, 2, 3))
