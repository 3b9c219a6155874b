"""Draw a square matrix of weights as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedfm.reports.svg import COLUMN, empty, frame, row_name
from fedfm.reports.text import esc, shorten, width_of

_HOVER = 30  # in a matrix with at most this many rows, cells show their values on hover
_LEVELS = 20  # number of levels of opacity


def matrix(width: int, names: Sequence[str], cells: Sequence[Sequence[float]], label: str, high: float) -> str:
    """Square cells, darkest for the value ``high``. Values below 0 have a second colour; ``names`` may be empty."""
    if not cells:
        return empty(width, label)
    left = min(max(width_of(n) for n in names) * COLUMN + 12, width * 0.3) if names else 0.0
    cell = min((width - left) / len(cells), 44.0)
    gap = 1.0 if cell > 6 else 0.0
    columns = [shorten(n, 14) for n in names] if cell >= 13 else []
    top = 10 + COLUMN * max(map(width_of, columns)) if columns else 4.0
    side = cell * len(cells)
    body = [f'<rect class="track" x="{left:.1f}" y="{top:.1f}" width="{side:.1f}" height="{side:.1f}"/>']
    for j, name in enumerate(columns):
        at = f"translate({left + (j + 0.5) * cell + 4:.1f} {top - 6:.1f}) rotate(-90)"
        body.append(f'<text transform="{at}">{esc(name)}</text>')
    every = 1 if cell >= 11 else math.ceil(11 / cell)  # skip names that would touch
    for i, name in enumerate(names):
        if i % every == 0:
            body.append(row_name(name, left, top + (i + 0.5) * cell + 4))
    hover = bool(names) and len(cells) <= _HOVER
    ink: dict[tuple[str, int], list[str]] = {}
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            level = min(round(_LEVELS * math.sqrt(min(abs(value) / high, 1.0))), _LEVELS) if high > 0 else 0
            if not level:
                continue
            colour, x, y, size = "s1" if value > 0 else "s2", left + j * cell, top + i * cell, cell - gap
            if hover:
                said = f"<title>{esc(names[i])} from {esc(names[j])}: {100 * value:.1f} %</title>"
                shape = f'<rect class="{colour}" fill-opacity="{_opacity(level):.2f}" x="{x:.1f}" y="{y:.1f}"'
                body.append(f'{shape} width="{size:.1f}" height="{size:.1f}">{said}</rect>')
            else:
                ink.setdefault((colour, level), []).append(f"M{x:.1f} {y:.1f}h{size:.1f}v{size:.1f}h-{size:.1f}z")
    for (colour, level), paths in sorted(ink.items()):
        body.append(f'<path class="cell {colour}" fill-opacity="{_opacity(level):.2f}" d="{"".join(paths)}"/>')
    return frame(width, top + side + 1, label, body)


def _opacity(level: int) -> float:
    return 0.08 + 0.92 * level / _LEVELS
