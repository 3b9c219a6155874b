"""Draw small plots as inline SVG.

The page's style sheet gives colours to the classes ``s1`` to ``s8``, for light and dark screens. Each ``aria-label``
describes its drawing. Values that are missing or not finite leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fedfm.reports.text import NBSP, esc, finite, numbers, shorten, width_of

T = TypeVar("T")
Point = tuple[float, float | None]
Format = Callable[[float | None], str]
MOST_POINTS = 1200  # largest number of points of a line; a screen shows no more, and more points would enlarge the file
COLOURS = 8
COLUMN = 7.64  # pixels of a digit at 12 px in DejaVu Sans, the widest of common fonts; letters have less on average


@dataclass(frozen=True)
class Series:
    """A line: its name, its points in order of x, and the number of its colour and dash (1 to 8)."""

    name: str
    points: Sequence[Point]
    colour: int = 1


@dataclass(frozen=True)
class Scale:
    """Maps values to pixels, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        at, low, high = value, self.low, self.high
        if self.log:
            at, low, high = math.log10(at), math.log10(low), math.log10(high)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -0.01), 1.01) * (self.end - self.start)


@dataclass(frozen=True)
class ChartBar:
    """A row of a bar chart.

    Attributes:
        value: length of the bar; None for no bar.
        text: text after the bar.
        title: text that is shown on hover.
    """

    label: str
    value: float | None
    text: str
    title: str = ""
    parts: Sequence[tuple[float, str]] = field(default=())  # stacked: (value, hover text), coloured in order


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """At most ``most`` round numbers that lie between ``low`` and ``high``, inclusive."""
    if not high > low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * k for k in (1, 2, 2.5, 5, 10, 20) if power * k >= raw * (1 - 1e-9))
    if whole:
        step = float(max(1, math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, min(last, first + 50) + 1)]


def domain(values: Sequence[float], within: tuple[float, float] | None = None) -> tuple[float, float]:
    """A range between two round numbers that contains the values and a margin; inside ``within``, if it is given."""
    least, most = within or (-math.inf, math.inf)
    low, high = min(values), max(values)
    margin = max((high - low) * 0.06, abs(high) * 0.01, 1e-2 if within else 1e-9)  # fractions are labelled to 0.1 %
    low, high = max(low - margin, least), min(high + margin, most)
    steps = ticks(low, high)
    step = steps[1] - steps[0] if len(steps) > 1 else high - low
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return max(low, least), min(high, most)


def neighbours(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """The items in at most ``most`` groups of neighbours, whose sizes differ by at most one."""
    n = min(most, len(items))
    return [items[len(items) * i // n : len(items) * (i + 1) // n] for i in range(n)]


def thin(points: Sequence[Point]) -> Sequence[Point]:
    """Every nth point and the last point; n is chosen so that at most about MOST_POINTS remain."""
    stride = math.ceil(len(points) / MOST_POINTS)
    return points if stride < 2 else [*points[:-1:stride], points[-1]]


def lines(
    width: int,
    series: Sequence[Series],
    label: str,
    form: Format,
    band: Sequence[tuple[float, float | None, float | None]] = (),
    within: tuple[float, float] | None = None,
    x_label: str = "round",
    height: int = 0,
    from_zero: bool = False,
) -> str:
    """Lines over integers x, with an optional band (x, least, greatest) behind the lines."""
    values = [*(y for s in series for _, y in s.points), *(y for _, *b in band for y in b)]
    known = [y for y in numbers(values) if abs(y) < 1e100]
    if not known:
        return empty(width, label)
    known += [0.0] if from_zero else []
    height = height or (300 if width > 500 else 230)
    log = within is None and not from_zero and min(known) > 0 and max(known) / min(known) > 1000
    marks: list[float] = []
    if log:
        low, high = min(known) / 1.3, max(known) * 1.3
        marks = [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    else:
        low, high = domain(known, within or ((0.0, math.inf) if from_zero else None))
    marks = marks[:: math.ceil(len(marks) / 6)] if len(marks) > 1 else ticks(low, high)
    named = [form(t) for t in marks]
    if all(".0" + NBSP in name for name in named):
        named = [name.replace(".0" + NBSP, NBSP) for name in named]
    left = 14 + COLUMN * max(map(len, named))
    xs = [x for s in series for x, _ in s.points]
    x = Scale(min(xs), max(xs), left + 6, width - max(12.0, len(f"{max(xs):.0f}") * COLUMN / 2 + 2))
    y = Scale(low, high, height - 40, 10, log)
    whole = [(t, f"{t:.0f}") for t in ticks(x.low, x.high, 8 if width > 500 else 5, whole=True)]
    body = axes(x, y, left, whole, list(zip(marks, named, strict=True)), width, height, x_label)
    body += [_band(run, x, y) for run in _runs([(a, lo, hi) for a, lo, hi in band])]
    for s in series:
        body += _line(s, x, y, form)
    return frame(width, height, label, body)


def axes(
    x: Scale,
    y: Scale,
    left: float,
    below: Sequence[tuple[float, str]],
    at_left: Sequence[tuple[float, str]],
    width: int,
    height: int,
    x_label: str,
) -> list[str]:
    """The grid of a plot, from ``left`` on, with marks (value, name) ``below`` the plot and ``at_left`` of it."""
    body = []
    for t, name in at_left:
        body.append(f'<line class="grid" x1="{left:.1f}" x2="{width - 4}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>')
        body.append(f'<text x="{left - 8:.1f}" y="{y(t) + 4:.1f}" text-anchor="end">{esc(name)}</text>')
    for t, name in below:
        body.append(f'<text x="{x(t):.1f}" y="{height - 20}" text-anchor="middle">{esc(name)}</text>')
    body.append(f'<text x="{(left + width) / 2:.1f}" y="{height - 3}" text-anchor="middle">{esc(x_label)}</text>')
    return body


def _runs(points: Sequence[tuple[float, float | None, float | None]]) -> list[list[tuple[float, float, float]]]:
    """The points, cut into pieces at missing values."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for a, lo, hi in points:
        if finite(lo) and finite(hi):
            runs[-1].append((a, lo, hi))
        elif runs[-1]:
            runs.append([])
    return [r for r in runs if r]


def _band(run: list[tuple[float, float, float]], x: Scale, y: Scale) -> str:
    if len(run) == 1:
        a, lo, hi = run[0]
        return f'<line class="band-1" x1="{x(a):.1f}" x2="{x(a):.1f}" y1="{y(lo):.1f}" y2="{y(hi):.1f}"/>'
    edge = [(a, hi) for a, _, hi in run] + [(a, lo) for a, lo, _ in reversed(run)]
    points = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in edge)
    return f'<polygon class="band" points="{points}"/>'


def _line(s: Series, x: Scale, y: Scale, form: Format) -> list[str]:
    out, few = [], len(s.points) <= 30
    for run in _runs([(a, b, b) for a, b in thin(s.points) if not (y.log and b is not None and b <= 0)]):
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b, _ in run)
        out.append(f'<path class="line s{s.colour}" d="M{path}"/>')
        for a, b, _ in run if few or len(run) == 1 else ():
            hover = f"<title>{esc(s.name)}, {a:.0f}: {esc(form(b))}</title>"
            out.append(f'<circle class="dot s{s.colour}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3">{hover}</circle>')
    return out


def bars(
    width: int,
    rows: Sequence[ChartBar],
    label: str,
    high: float = 1.0,
    reference: tuple[float, str] | None = None,
    spans: Sequence[tuple[float, float] | None] = (),
) -> str:
    """Horizontal bars, one per row. Bars with parts are stacked. With ``spans``, a dot on a range replaces each bar."""
    if not rows:
        return empty(width, label)
    step, top = 26, 22 if reference else 4
    left = min(max(width_of(r.label) for r in rows) * COLUMN + 12, width * 0.32)
    right = max(max(width_of(r.text) for r in rows) * COLUMN + 10, 30)
    x = Scale(0, high if high > 0 else 1.0, left, width - right)
    body = []
    for i, row in enumerate(rows):
        y = top + i * step
        name = esc(shorten(row.label, int((left - 10) / COLUMN)))
        body.append(f"<g><title>{esc(row.title or f'{row.label}: {row.text}')}</title>")
        body.append(f'<text class="name" x="{left - 8:.1f}" y="{y + 17}" text-anchor="end">{name}</text>')
        body.append(f'<rect class="track" x="{left:.1f}" y="{y + 4}" width="{x.end - left:.1f}" height="18" rx="2"/>')
        value, end = row.value, left
        if finite(value):
            end = x(max(value, 0.0))
            span = spans[i] if spans else None
            if row.parts:
                body += _parts(row, x, y)
            elif spans:
                if span:
                    a, b = x(span[0]), x(span[1])
                    body.append(f'<line class="span" x1="{a:.1f}" x2="{b:.1f}" y1="{y + 13}" y2="{y + 13}"/>')
                body.append(f'<circle class="dot s1" cx="{end:.1f}" cy="{y + 13}" r="5"/>')
            else:
                size = f'width="{end - left:.1f}" height="18"'
                body.append(f'<rect class="s1" x="{left:.1f}" y="{y + 4}" {size} rx="2"/>')
        body.append(f'<text class="value" x="{x.end + 8:.1f}" y="{y + 17}">{esc(row.text)}</text></g>')
    height = top + len(rows) * step
    if reference and math.isfinite(reference[0]):
        at = x(reference[0])
        body.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" y2="{height}"/>')
        side = "end" if at > (left + x.end) / 2 else "start"
        body.append(f'<text x="{at:.1f}" y="13" text-anchor="{side}">{esc(reference[1])}</text>')
    return frame(width, height, label, body)


def _parts(row: ChartBar, x: Scale, y: int) -> list[str]:
    out, total = [], 0.0
    for i, (value, hover) in enumerate(row.parts):
        a, b = x(total), x(total + value)
        total += value
        if value > 0:
            shape = f'<rect class="s{i % COLOURS + 1} part" x="{a:.1f}" y="{y + 4}"'
            out.append(f'{shape} width="{max(b - a, 0.5):.1f}" height="18"><title>{esc(hover)}</title></rect>')
    return out


def heat(
    width: int, rows: Sequence[tuple[str, Sequence[float], str]], columns: Sequence[str], label: str, high: float
) -> str:
    """Cells whose colour shows a fraction, darkest for ``high``.

    A row has a name, a fraction for each column, and a text at its right end.
    """
    if not rows or not columns:
        return empty(width, label)
    left = min(max(width_of(r[0]) for r in rows) * COLUMN + 12, width * 0.28)
    right = max(width_of(r[2]) for r in rows) * COLUMN + 12
    cell = (width - left - right) / len(columns)
    step = 24 if len(rows) <= 20 else 18
    upright = cell >= 13 and max(width_of(c) for c in columns) * COLUMN > cell - 3
    names = [shorten(c, 14) for c in columns]
    top = 20 if not upright else 12 + COLUMN * max(width_of(c) for c in names)
    gap = 1.5 if cell > 6 else 0.0
    body = []
    for j, name in enumerate(names if cell >= 13 else ()):
        at = left + (j + 0.5) * cell
        place = f'x="{at:.1f}" y="{top - 6:.1f}" text-anchor="middle"'
        if upright:
            place = f'transform="translate({at + 4:.1f} {top - 6:.1f}) rotate(-90)"'
        body.append(f"<text {place}>{esc(name)}</text>")
    if cell < 13:
        body.append(f'<text x="{left:.1f}" y="{top - 6:.1f}">{esc(shorten(columns[0], 14))}</text>')
        last = esc(shorten(columns[-1], 14))
        body.append(f'<text x="{left + cell * len(columns):.1f}" y="{top - 6:.1f}" text-anchor="end">{last}</text>')
    for i, (name, shares, text) in enumerate(rows):
        y = top + i * step
        base, size = y + step / 2 + 4, f'width="{cell * len(columns):.1f}" height="{step - 1.5}"'
        body.append(row_name(name, left, base))
        body.append(f'<rect class="track" x="{left:.1f}" y="{y:.1f}" {size}/>')
        for j, share in enumerate(shares):
            if share > 0:
                ink = 0.14 + 0.86 * math.sqrt(min(share / high, 1.0)) if high > 0 else 1.0
                shape = f'<rect class="s1" fill-opacity="{ink:.2f}" x="{left + j * cell:.1f}" y="{y:.1f}"'
                size = f'width="{max(cell - gap, 0.5):.1f}" height="{step - 1.5}"'
                body.append(f"{shape} {size}><title>{esc(name)}, {esc(columns[j])}: {100 * share:.1f} %</title></rect>")
        body.append(f'<text class="value" x="{width}" y="{base:.1f}" text-anchor="end">{esc(text)}</text>')
    return frame(width, top + len(rows) * step, label, body)


def row_name(name: str, left: float, base: float) -> str:
    """The name to the left of a row that begins at ``left``; a long name is cut, and shown in full on hover."""
    cut = esc(shorten(name, int((left - 10) / COLUMN)))
    place = f'x="{left - 8:.1f}" y="{base:.1f}" text-anchor="end"'
    return f'<text class="name" {place}>{cut}<title>{esc(name)}</title></text>'


def empty(width: int, label: str) -> str:
    """A placeholder for a drawing without values."""
    text = f'<text x="{width / 2:.1f}" y="42" text-anchor="middle">no values yet</text>'
    return frame(width, 72, label, [f'<rect class="track" width="{width}" height="72" rx="4"/>', text])


def frame(width: int, height: float, label: str, body: Sequence[str]) -> str:
    """The drawing as one SVG element."""
    size = f'viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{esc(label)}">{"".join(body)}</svg>'
