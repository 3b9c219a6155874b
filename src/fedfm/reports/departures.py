"""The section about clients that have left, by ``fedfm leave``."""

from __future__ import annotations

from fedfm.reports.client_worth import interval
from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, sequence
from fedfm.reports.text import esc


def section(run: RunFiles) -> str:
    """A table with a line for each client that left, and the last certificate's list of what was not removed."""
    entries = [mapping(entry) for entry in sequence(run.manifest.get("departures"))]
    rows = []
    for entry in entries:
        found = mapping(entry.get("membership"))
        aucs = [interval(mapping(found.get(key)), "auc") or "not compared" for key in ("before", "after")]
        rows.append(
            [str(entry.get("client")), str(entry.get("how")), str(mapping(entry.get("from")).get("run")), *aucs]
        )
    kept = "; ".join(str(what) for entry in entries[-1:] for what in sequence(entry.get("not_removed")))
    text = (
        "Clients that left the federation; this run was made without them, or asked them for nothing. AUC: how well a "
        "model tells the client's training rows from test rows; 0.5 is guessing. If none was measured, `fedfm audit "
        f"--attack departure` measures it. Not removed: {kept}."
    )
    head = ["client", "how", "from the run", "AUC before", "AUC now"]
    return note(esc(text)) + table(head, rows, "Clients that left", words=(1, 2))


def summary(run: RunFiles) -> list[str]:
    """Sentences for the dossier about clients that left."""
    found = []
    for entry in map(mapping, sequence(run.manifest.get("departures"))):
        kept = "; ".join(map(str, sequence(entry.get("not_removed"))))
        found.append(f"{entry.get('client')} has left ({entry.get('how')}). Not removed: {kept}.")
    return found
