"""Accuracy against epsilon, one picture of all tables, from what ``python reproduce/run.py privacy`` has kept.

python reproduce/privacy/picture.py       # writes docs/figures/privacy.svg
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedfm.api.intervals import interval

ROOT = Path(__file__).resolve().parents[2]
BLUE, GREEN, PURPLE = "#0072b2", "#00805e", "#8e44ad"  # protect a row
RED, ORANGE, BROWN = "#c0392b", "#d98200", "#7a5c00"  # protect a client


@dataclass(frozen=True)
class Line:
    """One row of a table at every epsilon, and the same without privacy."""

    table: str
    row: str
    says: str
    colour: str
    bare: str


def heads(table: str) -> list[Line]:
    """The lines of heads on the features of one set."""
    return [
        Line(table, "fedpft_10", "FedPFT, one release", BLUE, "fedpft_10"),
        Line(table, "dp_sgd_10", "DP-SGD, 10 clients", GREEN, "fedavg_10"),
        Line(table, "client_500", "FedAvg, 500 clients", RED, "fedavg_500"),
        Line(table, "client_100", "FedAvg, 100 clients", ORANGE, "fedavg_100"),
        Line(table, "hidden_100", "100 clients, hidden sums", BROWN, "fedavg_100"),
    ]


def few_rows(table: str) -> list[Line]:
    """LoRA and a head on the same few rows."""
    return [
        Line(table, "head_5", "DP-SGD, head", GREEN, "head_5"),
        Line(table, "dp_sgd_5", "DP-SGD, LoRA", PURPLE, "fedavg_5"),
    ]


CLIENTS = Line("lora", "client_100", "100 clients, LoRA", ORANGE, "fedavg_100")
PANELS = [
    ("CIFAR-10", "9,402 rows, head on features", heads("cifar10")),
    ("banking77", "10,003 rows, head on features", heads("banking77")),
    ("CIFAR-10", "1,500 pictures", [*few_rows("lora"), CLIENTS]),
    ("banking77", "3,850 texts, 5 clients", few_rows("banking77_lora")),
]
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
PLOT, LEFT, TOP, HIGH, FOOT = 172, 50, 104, 330, 46
LABELS = (178, 178, 122, 118)  # beside each panel
WIDTH, HEIGHT = LEFT + len(PANELS) * PLOT + sum(LABELS), TOP + HIGH + FOOT
APART = 17  # from label to label


def figures(kept: dict[str, Any], table: str, row: str) -> list[float]:
    """Accuracies of all seeds, in per cent; empty if the row was not run."""
    return [float(seed["accuracy"]) for seed in kept.get(table, {}).get("rows", {}).get(row, {}).values()]


def y(accuracy: float) -> float:
    """The vertical position of an accuracy in per cent."""
    return TOP + (1 - min(max(accuracy, 0.0), 100.0) / 100) * HIGH


def apart(places: list[float]) -> list[float]:
    """The places in their order, moved until they are ``APART``."""
    order = sorted(range(len(places)), key=places.__getitem__)
    found = list(places)
    for _ in range(200):
        for a, b in pairwise(order):
            if (lack := APART - (found[b] - found[a])) > 0:
                found[a], found[b] = found[a] - lack / 2, found[b] + lack / 2
    return found


def panel(kept: dict[str, Any], left: float, title: str, rows: str, lines: list[Line]) -> list[str]:
    """Axes, and for each line its band, its mean, its dashed figure without privacy and its name."""

    def x(epsilon: float) -> float:
        return left + 10 + math.log2(epsilon / EPSILONS[0]) / 4 * (PLOT - 20)

    out = [
        f'<text x="{left}" y="{TOP - 30}" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{left}" y="{TOP - 13}" fill="#333">{escape(rows)}</text>',
    ]
    for part in range(0, 101, 20):
        out.append(f'<path d="M{left} {y(part):.1f}h{PLOT}" stroke="#e4e4e4"/>')
        if left == LEFT:
            out.append(f'<text x="{left - 7}" y="{y(part) + 4:.1f}" text-anchor="end" fill="#555">{part} %</text>')
    for epsilon in EPSILONS:
        out.append(f'<path d="M{x(epsilon):.1f} {TOP + HIGH}v4" stroke="#555"/>')
        at = f'x="{x(epsilon):.1f}" y="{TOP + HIGH + 18}"'
        out.append(f'<text {at} text-anchor="middle" fill="#555">{epsilon:g}</text>')
    out.append(f'<text x="{left + PLOT / 2}" y="{TOP + HIGH + 37}" text-anchor="middle" fill="#555">epsilon</text>')
    ends, marks = [], []
    for line in lines:
        points = [
            (x(e), *interval(found)) for e in EPSILONS if (found := figures(kept, line.table, f"{line.row}.{e:g}"))
        ]
        if not points:
            continue
        if bare := figures(kept, f"{line.table}_open", line.bare):
            out.append(
                f'<path d="M{left} {y(interval(bare)[0]):.1f}h{PLOT}" stroke="{line.colour}" stroke-dasharray="5 4"/>'
            )
        if all(half is not None and math.isfinite(half) for *_, half in points):
            above = [f"{at:.1f} {y(mean + half):.1f}" for at, mean, half in points]
            below = [f"{at:.1f} {y(mean - half):.1f}" for at, mean, half in reversed(points)]
            out.append(f'<path d="M{"L".join(above + below)}Z" fill="{line.colour}" fill-opacity="0.14"/>')
        path = "L".join(f"{at:.1f} {y(mean):.1f}" for at, mean, _ in points)
        marks.append(f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"/>')
        marks += [f'<circle cx="{a:.1f}" cy="{y(m):.1f}" r="3" fill="{line.colour}"/>' for a, m, _ in points]
        ends.append((line, points[-1][0], y(points[-1][1])))
    for (line, at, end), place in zip(ends, apart([end for *_, end in ends]), strict=True):
        from_, to = at + 5, left + PLOT + 6
        marks.append(f'<path d="M{from_:.1f} {end:.1f}L{to} {place:.1f}" stroke="{line.colour}" stroke-width="0.8"/>')
        marks.append(f'<text x="{to + 4}" y="{place + 4.5:.1f}" fill="{line.colour}">{escape(line.says)}</text>')
    return out + marks


def picture(kept: dict[str, Any]) -> str:
    """An SVG: means over the seeds, and their 95 % intervals."""
    about = (
        f'<tspan fill="{BLUE}">blue, green, violet: a row is protected</tspan>'
        f'<tspan fill="#333">  |  </tspan><tspan fill="{RED}">red, orange, brown: a client is protected</tspan>'
        '<tspan fill="#333">  |  dashed: the same without privacy; band: 95 % interval of the mean</tspan>'
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        '<title>Accuracy against epsilon</title><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="17">Accuracy that privacy leaves, at delta = 1e-5</text>',
        f'<text x="{LEFT}" y="44" xml:space="preserve">{about}</text>',
    ]
    for place, (title, rows, lines) in enumerate(PANELS):
        out += panel(kept, LEFT + place * PLOT + sum(LABELS[:place]), title, rows, lines)
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Write the picture."""
    kept = json.loads((ROOT / "docs/results/privacy.json").read_text(encoding="utf-8"))
    (ROOT / "docs/figures/privacy.svg").write_text(picture(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
