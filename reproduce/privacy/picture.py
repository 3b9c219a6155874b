"""Accuracy against epsilon: one picture a data set, from what ``python reproduce/run.py privacy`` has kept.

python reproduce/privacy/picture.py       # writes docs/figures/privacy-<set>.svg
"""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETS = {
    "cifar10": "CIFAR-10 features, linear head",
    "banking77": "banking77 features, linear head",
    "lora": "CIFAR-10 pictures, LoRA of nano-vit, one seed",
}
LINES = {  # row -> what it is, colour, and the row without privacy
    "fedpft_10": ("FedPFT, 10 clients, one release of rows", "#0072b2", "fedpft_10"),
    "dp_sgd_10": ("DP-SGD, 10 clients, rows", "#009e73", "fedavg_10"),
    "client_500": ("FedAvg, 500 clients, noise at the server, clients", "#d55e00", "fedavg_500"),
    "client_100": ("FedAvg, 100 clients, noise at the server, clients", "#cc79a7", "fedavg_100"),
    "hidden_100": ("FedAvg, 100 clients, hidden sums and noise, clients", "#7a5c00", "fedavg_100"),
    "dp_sgd_5": ("DP-SGD, 5 clients of 300 pictures, rows", "#009e73", "fedavg_5"),
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 430, 56, 390, 40, 50
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
OPEN = 16.0  # where the figures without privacy stand


def accuracies(kept: dict[str, Any], table: str, row: str) -> list[float]:
    """Of all seeds; empty if the row was not run."""
    return [float(seed["accuracy"]) / 100 for seed in kept.get(table, {}).get("rows", {}).get(row, {}).values()]


def picture(kept: dict[str, Any], name: str) -> str:
    """An SVG: mean and range over the seeds."""

    def x(epsilon: float) -> float:
        return LEFT + 12 + math.log2(epsilon / 0.5) / 5 * (WIDTH - RIGHT - LEFT - 24)

    def y(accuracy: float) -> float:
        return TOP + (1 - accuracy) * (HEIGHT - TOP - BOTTOM)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<title>{escape(SETS[name])}: accuracy against epsilon</title><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(SETS[name])}: accuracy at delta = 1e-5</text>',
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10 * tenth} %</text>')
    for epsilon in (*EPSILONS, OPEN):
        text = "none" if epsilon == OPEN else f"{epsilon:g}"
        out.append(f'<text x="{x(epsilon):.1f}" y="{HEIGHT - 30}" text-anchor="middle">{text}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">epsilon</text>')
    there = [row for row in LINES if accuracies(kept, name, f"{row}.{EPSILONS[0]:g}")]
    for place, row in enumerate(there):
        text, colour, bare = LINES[row]
        points = [(e, found) for e in EPSILONS if (found := accuracies(kept, name, f"{row}.{e:g}"))]
        if found := accuracies(kept, f"{name}_open", bare):
            points.append((OPEN, found))
        path = "L".join(f"{x(e):.1f} {y(mean(a)):.1f}" for e, a in points if e != OPEN)
        out.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if path else "")
        for e, a in points:
            out.append(f'<path d="M{x(e):.1f} {y(min(a)):.1f}V{y(max(a)):.1f}" stroke="{colour}"/>')
            out.append(f'<circle cx="{x(e):.1f}" cy="{y(mean(a)):.1f}" r="3.5" fill="{colour}"/>')
        at = TOP + 14 + 24 * place
        out.append(f'<path d="M{WIDTH - RIGHT + 14} {at}h22" stroke="{colour}" stroke-width="2"/>')
        out.append(f'<text x="{WIDTH - RIGHT + 42}" y="{at + 4}">{escape(text)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> None:
    """Write the pictures."""
    kept = json.loads((ROOT / "docs/results/privacy.json").read_text(encoding="utf-8"))
    for name in SETS:
        (ROOT / f"docs/figures/privacy-{name}.svg").write_text(picture(kept, name), encoding="utf-8")


if __name__ == "__main__":
    main()
