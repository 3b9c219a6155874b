"""Plot accuracy by bytes sent: each run is a point, and a line joins the best runs (FedPFT, Figure 4)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fedfm.reports.basis import basis
from fedfm.reports.page import figure, note
from fedfm.reports.read import RunFiles
from fedfm.reports.svg import COLOURS, Scale, axes, domain, frame, ticks
from fedfm.reports.text import esc, finite, percent, shorten, size

Spot = tuple[str, float, float]  # name, bytes and accuracy of a run


def section(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """The plot as HTML; empty unless at least two runs have an accuracy and have sent bytes."""
    by, spots = basis(runs), []
    alone, pooled = list[str](), list[str]()
    for run, name in zip(runs, short(names), strict=True):
        if run.method == "centralised":
            pooled.append(name)  # a run with all rows in one place sends no bytes
            continue
        sent, reached = (run.traffic_total("up") or 0) + (run.traffic_total("down") or 0), run.value(by.key)
        if finite(reached) and sent > 0:
            spots.append((name, float(sent), reached))
        elif finite(reached):
            alone.append(name)
    if len(spots) < 2:
        return ""
    best = frontier(spots)
    points = "; ".join(f"{name} {percent(y)} for {size(x)}" for name, x, y in spots)
    label = f"Accuracy by bytes sent in both directions, on a logarithmic scale. {points}."
    text = f"Accuracy {by.rows}. " if by.mixed else ""
    text += (
        "The line joins the runs whose accuracy no other run reaches with fewer bytes: "
        f"{esc(', '.join(n for n, _, _ in best))}."
    )
    left = [(pooled, "all rows are in one place"), (alone, "nothing is sent")]
    text += "".join(f" Not shown: {esc(', '.join(which))}; {why}." for which, why in left if which)
    return "<h3>Accuracy for what was sent</h3>" + note(text) + figure(lambda w: _draw(w, spots, best, label))


def short(names: Sequence[str]) -> list[str]:
    """The names without their common beginning and end."""
    if len(names) < 2:
        return list(names)
    start = _prefix_length(names)
    end = _prefix_length([name[:start:-1] for name in names])
    out = [name[start : len(name) - end] for name in names]
    return out if all(out) and len(set(out)) == len(out) else list(names)


def _prefix_length(names: Sequence[str]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))


def frontier(spots: Sequence[Spot]) -> list[Spot]:
    """The Pareto frontier in order of bytes: all points whose accuracy is not reached by a point with fewer bytes."""
    out: list[Spot] = []
    for spot in sorted(spots, key=lambda s: (s[1], -s[2])):
        if not out or spot[2] > out[-1][2]:
            out.append(spot)
    return out


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Whether two boxes (x, y, width, height) overlap."""
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def _draw(width: int, spots: Sequence[Spot], best: Sequence[Spot], label: str) -> str:
    height = 300 if width > 500 else 230
    sent, reached = [s for _, s, _ in spots], [a for _, _, a in spots]
    left = 62.0
    x = Scale(min(sent) / 1.5, max(sent) * 1.5, left + 6, width - 14, log=True)
    y = Scale(*domain(reached, (0.0, 1.0)), height - 40, 14)
    powers = range(math.ceil(math.log10(x.low)), math.floor(math.log10(x.high)) + 1)
    below = [(t, size(t)) for t in [10.0**k for k in powers] or [min(sent), max(sent)]]
    at_left = [(t, percent(t)) for t in ticks(y.low, y.high)]
    body = axes(x, y, left, below, at_left, width, height, "sent, up and down")
    path = "L".join(f"{x(s):.1f} {y(a):.1f}" for _, s, a in best)
    body.append(f'<path class="line s1" d="M{path}"/>')
    written: list[tuple[float, float, float, float]] = []
    first = [*best, *(spot for spot in spots if spot not in best)]
    for i, (name, s, a) in enumerate(first):
        hover = f"<title>{esc(name)}: {esc(percent(a))} for {esc(size(s))}</title>"
        body.append(f'<circle class="dot s{i % COLOURS + 1}" cx="{x(s):.1f}" cy="{y(a):.1f}" r="4">{hover}</circle>')
        text = shorten(name, 22)
        long = 6.6 * len(text)
        at, anchor = (x(s) - 7, "end") if x(s) > width * 0.7 else (x(s) + 7, "start")
        box = (at - long if anchor == "end" else at, y(a) - 18, long, 14.0)
        if not any(_overlap(box, other) for other in written):  # a name without room is shown only on hover
            written.append(box)
            body.append(f'<text x="{at:.1f}" y="{y(a) - 6:.1f}" text-anchor="{anchor}">{esc(text)}</text>')
    return frame(width, height, label, body)
