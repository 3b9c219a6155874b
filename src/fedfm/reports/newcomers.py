"""The section about clients that joined after training, by ``fedfm join``."""

from __future__ import annotations

from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, numeric
from fedfm.reports.text import esc, percent


def section(run: RunFiles) -> str:
    """A table with a line for each newcomer; empty without newcomers."""
    joined = mapping(run.manifest.get("newcomers"))
    rows = []
    for name, about in joined.items():
        found = mapping(about)
        shares = sorted(((numeric(p) or 0.0, str(c)) for c, p in mapping(found.get("weights")).items()), reverse=True)
        figures = (percent(numeric(found.get(key))) for key in ("start_accuracy", "accuracy", "alone_accuracy"))
        rows.append([str(name), *figures, ", ".join(f"{c} {percent(p)}" for p, c in shares[:3])])
    if not rows:
        return ""
    head = ["newcomer", "its start", "its model", "alone", "made mostly of"]
    text = "Clients that joined after training. Three models are scored on a newcomer's own test rows: the model that "
    text += "it starts from, this model after local training, and a model that was trained as long without the "
    text += "federation."
    return note(esc(text)) + table(head, rows, "Newcomers", words=(4,))
