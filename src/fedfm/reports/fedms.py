"""The section about a FedMS run: parameters that stage two trains in each round, and the time of backward passes."""

from __future__ import annotations

from fedfm.reports.page import figure, note, table
from fedfm.reports.read import RunFiles
from fedfm.reports.svg import Series, lines
from fedfm.reports.text import count, duration, number

_HEAD = ["round", "parameters trained, all clients", "mean per client", "mean active layers", "rows for the decision"]


def section(run: RunFiles) -> str:
    """The section; empty for other methods and before stage two."""
    timed = [r for r in run.rounds if "backward_seconds" in r.figures]
    if not timed:
        return ""
    rows = []
    for r in timed:
        f = r.figures
        counts = [count(round(f.get(name, 0.0))) for name in ("trainable", "trainable_mean")]
        layers, deciding = number(f.get("active_layers")), count(round(f.get("deciding_rows", 0.0)))
        rows.append([str(r.number), *counts, layers, deciding, duration(f["backward_seconds"])])
    text = (
        "Stage two: a client trains LoRA in its top active layers, and the gate. Each client measures the time of its "
        "backward passes, and the table has the sum over the clients. Other programs on a machine change these times, "
        "but no other figure."
    )
    points = [(float(r.number), r.figures.get("active_layers")) for r in timed]
    label = "Mean active layers by round: " + ", ".join(f"{row[0]}: {row[3]}" for row in rows) + "."
    draw = figure(lambda w: lines(w, [Series("active layers", points)], label, number, x_label="round"))
    return note(text) + (draw if len(timed) > 1 else "") + table([*_HEAD, "backward passes"], rows, "Active layers")
