"""Write sections of the report: metrics by round and by client, the split, time, and exclusions.

Each public function takes a run and returns HTML.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fedfm.core.metric_names import GLOBAL_ACCURACY, LOCAL_ACCURACY
from fedfm.reports.page import details, figure, legend, note, swatches, table
from fedfm.reports.read import Round, RunFiles, mapping, numeric, sequence, whole
from fedfm.reports.svg import COLOURS, ChartBar, Format, Series, bars, heat, lines, neighbours
from fedfm.reports.text import count, duration, esc, finite, number, numbers, percent, plural

_ABBREVIATIONS = {word.lower(): word for word in ("F1", "AUROC", "MRR", "NDCG", "IoU", "ROUGE")}  # in names of scores
MOST_BARS = 40  # largest number of clients with one bar each; if there are more, a bar is the mean of a group
MOST_COLUMNS = 100
MOST_CELLS = 20_000  # largest number of cells in the table of class counts


def curves(run: RunFiles) -> str:
    """Accuracy, perplexity and losses by round; each of them only if it is defined."""
    rounds = run.rounds
    if not rounds:
        return note("No round has been committed yet.")
    out = []
    if any(_any(rounds, key) for key in (GLOBAL_ACCURACY, LOCAL_ACCURACY, "accuracy")):
        out.append(_accuracy(rounds))
    if ages := [r.number - t for r in rounds for t in numbers(r.scored.values())]:
        out.append(
            note(
                "The rounds are asynchronous: in all rounds but the first and the last, a client's scores are the "
                f"last that it reported. They are of models that are up to {plural(int(max(ages)), 'round')} old."
            )
        )
    measured = [r for r in rounds if r.values.get("perplexity") is not None]
    if len(measured) == 1 and len(rounds) > 1:  # clients' own models are evaluated on the global test rows at the end
        last = number(measured[0].values["perplexity"])
        out.append(note(f"Perplexity on the global test rows: {last}, measured in round {measured[0].number} only."))
    elif measured:
        out.append(
            "<h3>Perplexity</h3>" * bool(out) + _plot(rounds, {"perplexity": "perplexity, global test rows"}, number)
        )
    for key in run.task.drawn:
        where = {key: "on the global test rows", f"local_{key}": "on the clients' test rows"}
        if some := {k: v for k, v in where.items() if _any(rounds, k)}:
            title = " ".join(_ABBREVIATIONS.get(word, word) for word in key.split("_"))
            out.append(
                f"<h3>{esc(title[:1].upper() + title[1:])}</h3>" + _plot(rounds, some, percent, within=(0.0, 1.0))
            )
    losses = {"loss": "loss, global test rows", "train_loss": "training loss, mean of the cohort"}
    losses["val_loss"] = "loss on the clients' validation rows"
    if not _any(rounds, "accuracy"):
        losses["local_loss"] = "loss, mean of the clients on their own test rows"
    losses = {k: v for k, v in losses.items() if _any(rounds, k)}
    if losses:
        out.append("<h3>Loss</h3>" * bool(out) + _plot(rounds, losses, number))
    if not out:
        out.append(note("Neither accuracy, perplexity nor loss is defined for this run."))
    return "".join(out) + _numbers(rounds, run.task.drawn)


def _accuracy(rounds: tuple[Round, ...]) -> str:
    names = {GLOBAL_ACCURACY: "on the global test rows", LOCAL_ACCURACY: "mean of the clients"}
    names = {k: v for k, v in names.items() if _any(rounds, k)} or {"accuracy": "accuracy"}
    spread = [(float(r.number), numbers(r.clients.values())) for r in rounds]
    band = [(t, min(values, default=None), max(values, default=None)) for t, values in spread]
    return _plot(rounds, names, percent, band if any(values for _, values in spread) else [], (0.0, 1.0))


def _plot(
    rounds: tuple[Round, ...],
    names: dict[str, str],
    form: Format,
    band: Sequence[tuple[float, float | None, float | None]] = (),
    within: tuple[float, float] | None = None,
) -> str:
    series = [
        Series(name, [(float(r.number), r.values.get(key)) for r in rounds], i)
        for i, (key, name) in enumerate(names.items(), start=1)
    ]
    ends = [form(s.points[-1][1]) for s in series]
    text = "; ".join(f"{s.name}: {form(s.points[0][1])} to {end}" for s, end in zip(series, ends, strict=True))
    label = f"Lines over rounds {rounds[0].number} to {rounds[-1].number}. {text}."
    draw = figure(lambda w: lines(w, series, label, form, band, within))
    broken = sum(1 for s in series for _, y in s.points if y is not None and not finite(y))
    gap = f"Left out: {plural(broken, 'value')} that {'is' if broken == 1 else 'are'} not finite."
    return legend(series, ends, "worst to best client" if band else "") + draw + (note(gap) if broken else "")


def _any(rounds: tuple[Round, ...], key: str) -> bool:
    return any(r.values.get(key) is not None for r in rounds)


def _numbers(rounds: tuple[Round, ...], drawn: Sequence[str]) -> str:
    keys = [k for k in rounds[0].values if _any(rounds, k)]
    shares = {"macro_f1", *drawn, *(f"local_{key}" for key in drawn)}
    shape: dict[str, Format] = {k: percent if "accuracy" in k or k in shares else number for k in keys}
    head = ["round", *(k.replace("_", " ") for k in keys), "time"]
    rows = [[str(r.number), *(shape[k](r.values[k]) for k in keys), duration(r.seconds)] for r in rounds]
    return details("All numbers per round", table(head, rows, "Metrics per round"))


def clients(run: RunFiles) -> str:
    """Each client's accuracy at the end, or its loss if no accuracy is defined.

    The best client comes first. Clients without scores come last.
    """
    as_loss = bool(numbers(run.client_loss.values()))
    final = run.client_loss if as_loss else run.client_accuracy
    known = numbers(final.values())
    if not final:
        return note("No accuracy per client was measured.")
    if run.experiment.get("privacy") and not known:
        return note("Under [privacy] no client is asked for scores: the ledger does not cover them.")
    if mapping(run.experiment.get("method")).get("counts") == "withheld" and not known:
        return note("No client is asked for scores, which would disclose its number of rows: counts are withheld.")
    form: Format = number if as_loss else percent
    name, sign = ("loss", 1) if as_loss else ("accuracy", -1)
    order = sorted(final, key=lambda c: (sign * v if finite(v := final[c]) else math.inf, c))
    rows = [ChartBar(c, final[c], _why_no_scores(run, c) if final[c] is None else form(final[c])) for c in order]
    text = f"{run.sample or plural(len(final), 'client')}, each model on the client's own test rows"
    mean = statistics.fmean(known) if known else None
    if as_loss:
        text += ", where no accuracy is defined: "
        text += f"mean loss {number(mean)}, worst {number(max(known))}, best {number(min(known))}; less is better"
    elif known:
        text += f": mean {percent(mean)}, worst {percent(min(known))}, best {percent(max(known))}, standard deviation "
        text += f"{100 * statistics.pstdev(known):.1f} points"
    if silent := sum(1 for v in final.values() if v is None):
        text += f". Left out of means: {count(silent)} without scores"
    many = len(rows) > MOST_BARS
    drawn = _group_bars([r for r in rows if finite(r.value)], form) if many else rows
    line = (mean, f"mean {form(mean)}") if mean is not None else None
    body = figure(lambda w: bars(w, drawn, f"Bars. {text}.", max(known) if as_loss else 1.0, line))
    listing = table(["client", name], [[r.label, r.text] for r in rows], f"{name.capitalize()} per client")
    all_or_some = "Clients of the sample" if run.sample else "All clients"
    body += _before_and_after(run, final, order, as_loss) or details(all_or_some, listing)
    grouped = "Sorted and averaged in groups of neighbours; each bar is a group's mean." if many else ""
    return note(f"{esc(text)}. {grouped}") + body


def _why_no_scores(run: RunFiles, client: str) -> str:
    """Words for a client without scores. A silo's reason is unknown: the run's files lack its rows and its policy."""
    counts = mapping(mapping(mapping(run.manifest.get("split")).get("clients")).get(client))
    return "no test rows" if mapping(counts.get("test")).get("rows") == 0 else "no scores"


def _before_and_after(run: RunFiles, final: Mapping[str, float | None], order: Sequence[str], as_loss: bool) -> str:
    """A table with two scores of each client: with the server's model, and after the last local training."""
    known = mapping(run.result.get("details")).get("server_client_loss" if as_loss else "server_client_accuracy")
    before = {str(c): numeric(v) for c, v in mapping(known).items()}
    if not numbers(before.values()):
        return ""
    form: Format = number if as_loss else percent
    unit, change = ("change", "{:+.3f}") if as_loss else ("points", "{:+.1f}")
    rows, gains = [], []
    for c in order:
        a, b, gain = before.get(c), final[c], ""
        if finite(a) and finite(b):
            gains.append((b - a) * (1 if as_loss else 100))
            gain = change.format(gains[-1])
        rows.append([c, form(a), form(b), gain])
    text = "theta_bar_i is the server's model for client i, theta_i the client's model after its last local pass; both "
    text += (
        "are evaluated on the client's own test rows. The first column shows the gain from other clients. A gain in "
    )
    text += "the second column may come from the last local pass alone"
    if gains:
        mean = change.format(statistics.fmean(gains))
        text += f" (here it moves the mean {'loss by ' + mean if as_loss else f'by {mean} points'})"
    head = ["client", "theta_bar_i (server's)", "theta_i (after the pass)", unit]
    listing = table(head, rows, "Before and after")
    return f"<h3>Before and after the last local pass</h3>{note(esc(text + '.'))}{listing}"


def _group_bars(rows: list[ChartBar], form: Format) -> list[ChartBar]:
    out, start = [], 0
    for part in neighbours(rows, 25):
        mean = statistics.fmean(r.value or 0.0 for r in part)
        places = f"{start + 1} to {start + len(part)}"
        title = f"Places {places}: {form(part[-1].value)} to {form(part[0].value)}"
        out.append(ChartBar(places, mean, form(mean), title))
        start += len(part)
    return out


def split(run: RunFiles) -> str:
    """Training rows of each class at each client."""
    part = mapping(run.manifest.get("split"))
    sums = mapping(part.get("sums"))  # for very many clients, the manifest has sums and a sample
    listed = mapping(part.get("sample" if sums else "clients"))
    sizes_of = {str(c): {k: _counts(v) for k, v in mapping(rows).items()} for c, rows in listed.items()}
    texts = map(str, [*sequence(part.get("notices")), *sequence(run.manifest.get("notices"))])
    notices = "".join(f"<li>{esc(n)}</li>" for n in dict.fromkeys(texts))
    notices = f'<ul class="plain">{notices}</ul>' if notices else ""
    if (kept := part.get("counts")) is not None:
        text = "Under [privacy] this report does not show the numbers of rows by client and class; "
        return note(f"{esc(text)}<code>{esc(kept)}</code> has them.") + notices
    if not sizes_of:
        return note("The manifest does not say how the rows were split.") + notices
    classes = [str(c) for c in sequence(part.get("classes"))]
    train = {c: rows.get("train", []) for c, rows in sizes_of.items()}
    widest = max(len(v) for v in train.values())
    if widest < len(classes):  # the rows are not counted by class, since they do not have one class each
        classes = []
    classes += [f"class {j}" for j in range(len(classes), widest)]
    train = {c: v + [0] * (len(classes) - len(v)) for c, v in train.items()}
    sizes = [sum(v) for v in train.values()]
    of = mapping(sums.get("train")) or {"rows": sum(sizes), "least": min(sizes), "most": max(sizes)}
    total, least, most = (int(whole(of.get(key))) for key in ("rows", "least", "most"))
    middle = numeric(of["median"]) if "median" in of else statistics.median(sizes)
    clients = int(whole(sums.get("clients"))) or len(train)
    text = f"{plural(total, 'training row')} at {plural(clients, 'client')}: {count(least)} to {count(most)} each, "
    text += f"median {number(middle)}"
    text += f"; {count(len(train))} clients are shown, evenly spaced in the list of names" if sums else ""
    if len(classes) > 1:
        kinds = [sum(1 for n in v if n) for v in train.values()]
        text += f"; {min(kinds)} to {max(kinds)} of {plural(len(classes), 'class', 'classes')} at a client"
    if len(classes) <= COLOURS and len(train) <= MOST_BARS:
        draw = _label_bars(train, classes, f"Stacked bars of training rows per class. {text}.")
    else:
        draw = _heat(train, classes, f"Heat map of the share of each class in a client's training rows. {text}.")
    return note(f"{esc(text)}.") + draw + notices + _counts_table(sizes_of, train, classes)


def _label_bars(train: dict[str, list[int]], classes: list[str], label: str) -> str:
    rows = []
    for c, v in train.items():
        parts = [(n, f"{c}, {k}: {count(n)}") for n, k in zip(v, classes, strict=True)]
        rows.append(ChartBar(c, sum(v), count(sum(v)), parts=parts))
    high = max(r.value or 0 for r in rows)
    return (swatches(classes) if len(classes) > 1 else "") + figure(lambda w: bars(w, rows, label, float(high)))


def _heat(train: dict[str, list[int]], classes: list[str], label: str) -> str:
    names, groups = classes, neighbours(range(len(classes)), MOST_COLUMNS)
    if len(classes) > MOST_COLUMNS:
        names = [f"{classes[g[0]]} to {classes[g[-1]]}" if len(g) > 1 else classes[g[0]] for g in groups]
    shares = {c: [sum(v[j] for j in g) / max(sum(v), 1) for g in groups] for c, v in train.items()}
    rows = [(c, s, count(sum(train[c]))) for c, s in shares.items()]
    many = ""
    if len(rows) > MOST_BARS:  # neighbours in this order have the same largest class, so their mean keeps the pattern
        rows.sort(key=lambda r: (max(range(len(r[1])), key=r[1].__getitem__, default=0), -max(r[1], default=0)))
        parts, rows = neighbours(rows, MOST_BARS), []
        for part in parts:
            mean = [statistics.fmean(column) for column in zip(*(s for _, s, _ in part), strict=True)]
            rows.append((plural(len(part), "client"), mean, count(sum(sum(train[c]) for c, _, _ in part))))
        many = " Clients are ordered by their largest class and gathered; a row is a group's mean share."
    high = max((max(s, default=0.0) for _, s, _ in rows), default=0.0)
    key = f'Share of a client\'s rows: 0 <span class="ramp"></span> {percent(high, 0)}. Right: training rows.{many}'
    return note(key) + figure(lambda w: heat(w, rows, names, label, high))


def _counts_table(sizes_of: dict[str, dict[str, list[int]]], train: dict[str, list[int]], classes: list[str]) -> str:
    by_class = len(train) * len(classes) <= MOST_CELLS
    rows = []
    for c, v in train.items():
        sums = [count(sum(sizes_of[c].get(k, []))) for k in ("train", "val", "test")]
        rows.append([c, *sums, str(sum(1 for n in v if n)), *(map(count, v) if by_class else ())])
    head = ["client", "train", "val", "test", "classes", *(classes if by_class else ())]
    listing = table(head, rows, "Rows per client and class")
    if not by_class:
        listing += note("<code>manifest.json</code> has the counts per class.")
    return details("All counts (training rows per class)", listing)


def _counts(value: object) -> list[int]:
    """Rows of each class, from a list, from {"rows", "by_class"}, or from a number of rows."""
    if isinstance(value, dict):
        value = value.get("by_class") or [value.get("rows")]
    return [max(int(whole(i)), 0) for i in (value if isinstance(value, list) else [value])]


def time(run: RunFiles) -> str:
    """Seconds of each round of training, and of round 0, which is only an evaluation."""
    timed = [(float(r.number), r.seconds) for r in run.rounds if r.number > 0]
    known = numbers(s for _, s in timed)
    start = numbers(r.seconds for r in run.rounds if r.number == 0)
    before = f" The evaluation before training took {duration(start[0])}." if start else ""
    if not known:
        return note(f"No round of training has been timed yet.{before}")
    text = f"{plural(len(known), 'round')}: median {duration(statistics.median(known))}, "
    text += f"longest {duration(max(known))}, together {duration(sum(known))}."
    line = [Series("seconds", timed)]
    label = f"Line of seconds per round. {text}"
    return note(f"{esc(text)}{before}") + figure(lambda w: lines(w, line, label, duration, height=190, from_zero=True))


def exclusions(run: RunFiles) -> str:
    """Clients that were excluded from rounds, with the reasons."""
    if not run.exclusions:
        return note("None: every client that was asked gave a valid reply.")
    rows = [[str(t), c, part, code, reason] for t, c, code, reason, part in run.exclusions]
    clients = len({c for _, c, *_ in run.exclusions})
    text = note(
        f"{plural(len(rows), 'exclusion')} of {plural(clients, 'client')}; the run continued without them. If only "
        "the scores of a client or its own model are missing, its update counts."
    )
    head = ["round", "client", "of", "code", "reason"]
    return text + table(head, rows, "Excluded clients", words=(1, 2, 3, 4))
