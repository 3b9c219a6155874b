"""Draws the README's figure from docs/results/fedpft.json: accuracy and traffic on CIFAR-10 features.

`python docs/generate.py` writes docs/figures/one-round.svg with it.
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import fmean

FILE = Path(__file__).parent / "figures" / "one-round.svg"
RESULTS = Path(__file__).parent / "results" / "fedpft.json"
TABLE = "table5_cifar10"
ROWS = {
    "fedpft_spherical_1": "FedPFT, 1 component a class",
    "fedpft_diag_10": "FedPFT, 10 components",
    "fedpft_private_eps1": "FedPFT, private at epsilon 1",
    "ccvr": "CCVR",
    "fedncm": "FedNCM",
    "fedbe": "FedBE",
    "average": "Average of heads",
    "ensemble": "Ensemble of heads",
    "fedkt": "FedKT",
    "fedavg": "FedAvg, 20 rounds",
}
MANY = ("fedavg",)
WIDTH, TOP, STEP = 820, 72, 20  # pixels
NAMES, SCORES, BYTES, PANEL = 206, 232, 538, 210  # right end of the names, left ends of both panels, their width
LOW, HIGH = 0.6, 1.0  # accuracy
LEAST, MOST = 0.05, 20.0  # megabytes
INK, PALE, ONE, SEVERAL = "#1f2933", "#d5dbe1", "#0b6e99", "#b5540c"


def draw() -> str:
    """The figure as one SVG file."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))[TABLE]["rows"]
    end = TOP + STEP * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 56}" width="{WIDTH}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}" role="img">',
        "<title>Accuracy and megabytes sent to the server, by method</title>",
        f'<rect width="{WIDTH}" height="{end + 56}" rx="6" fill="#ffffff"/>',
        _text(16, 26, "50 clients, CIFAR-10 features of a frozen ViT-tiny, Dirichlet(0.1)", weight=600),
        _text(SCORES, 54, f"accuracy, mean and range of {len(found[MANY[0]])} seeds", weight=600),
        _text(BYTES, 54, "MB sent by all clients together", weight=600),
    ]
    for value in (0.6, 0.7, 0.8, 0.9, 1.0):
        parts += _tick(_score(value), end, f"{value:.1f}")
    for value in (0.1, 1.0, 10.0):
        parts += _tick(_bytes(value), end, f"{value:g}")
    for i, (row, name) in enumerate(ROWS.items()):
        y = TOP + STEP * i + 12
        colour = SEVERAL if row in MANY else ONE
        seeds = [run["accuracy"] / 100 for run in found[row].values()]
        sent = fmean(run["megabytes_up"] for run in found[row].values())
        parts += [
            _text(NAMES, y + 4, name, anchor="end"),
            f'<path d="M{_score(min(seeds)):.1f} {y}H{_score(max(seeds)):.1f}" stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{_score(fmean(seeds)):.1f}" cy="{y}" r="4.5" fill="{colour}"/>',
            _text(SCORES + PANEL + 12, y + 4, f"{fmean(seeds):.3f}"),
            f'<circle cx="{_bytes(sent):.1f}" cy="{y}" r="4.5" fill="{colour}"/>',
            _text(BYTES + PANEL + 12, y + 4, f"{sent:.2f}"),
        ]
    central = fmean(run["accuracy"] / 100 for run in found["centralised_converged"].values())
    x = _score(central)
    parts += [
        f'<path d="M{x:.1f} {TOP - 4}V{end}" stroke="{INK}" stroke-dasharray="4 3"/>',
        _text(x, end + 36, f"all rows in one place: {central:.3f}", anchor="middle"),
        _text(BYTES, end + 36, "blue: one round; orange: 20 rounds"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _score(value: float) -> float:
    return SCORES + PANEL * (value - LOW) / (HIGH - LOW)


def _bytes(value: float) -> float:
    return BYTES + PANEL * math.log(value / LEAST) / math.log(MOST / LEAST)


def _tick(x: float, end: int, text: str) -> list[str]:
    line = f'<path d="M{x:.1f} {TOP - 4}V{end}" stroke="{PALE}"/>'
    return [line, _text(x, end + 17, text, anchor="middle")]


def _text(x: float, y: float, text: str, anchor: str = "start", weight: int = 400) -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
