"""Draw true values against predicted values."""

from __future__ import annotations

from fedfm.core.score_plots import Groups
from fedfm.reports.page import figure, note
from fedfm.reports.svg import Scale, axes, domain, empty, frame, ticks
from fedfm.reports.text import esc, plural

_MOST = 6  # largest number of targets that are drawn


def drawings(found: list[Groups]) -> str:
    """The plots with a heading; an empty text if there are none."""
    some = [groups for groups in found if groups.points]
    if not some:
        return ""
    out = ["<h3>Predicted and true values</h3>"]
    for groups in some[:_MOST]:
        name = f"<figcaption>{esc(groups.name)}</figcaption>" if len(some) > 1 else ""
        out.append(name + figure(lambda width, groups=groups: _draw(groups, width)))  # type: ignore[misc]
    out.append(note(esc(some[0].note)))
    if len(some) > _MOST:
        out.append(note(f"The first {_MOST} of {len(some)} targets."))
    return "".join(out)


def _draw(groups: Groups, width: int) -> str:
    points = groups.points
    text = "; ".join(f"predicted {x:.4g}, true {y:.4g} ({plural(n, 'row')})" for x, y, _, _, n in points)
    label = f"{groups.name}, means of groups of rows: {text}."
    values = [v for x, y, low, high, _ in points for v in (x, y, low, high) if v is not None]
    if not values:
        return empty(width, label)
    low, high = domain(values)
    height = 300 if width > 500 else 260
    marks = ticks(low, high)
    named = [(t, f"{t:.6g}") for t in marks]
    left = 14 + 6.6 * max(len(name) for _, name in named)
    x, y = Scale(low, high, left + 6, width - 16), Scale(low, high, height - 40, 10)
    body = axes(x, y, left, named, named, width, height, "predicted")
    body.append(f'<line class="mark" x1="{x(low):.1f}" y1="{y(low):.1f}" x2="{x(high):.1f}" y2="{y(high):.1f}"/>')
    for said, true, least, greatest, n in points:
        hover = f"<title>{plural(n, 'row')}: predicted {said:.4g}, true {true:.4g}</title>"
        if least is not None and greatest is not None:
            hover = hover.replace("</title>", f" [{least:.4g}, {greatest:.4g}]</title>")
            place = f'x1="{x(said):.1f}" x2="{x(said):.1f}" y1="{y(least):.1f}" y2="{y(greatest):.1f}"'
            body.append(f'<line class="span" {place}/>')
        body.append(f'<circle class="dot s1" cx="{x(said):.1f}" cy="{y(true):.1f}" r="4">{hover}</circle>')
    return frame(width, height, label, body)
