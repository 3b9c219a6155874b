"""The predictions that runs stored in a silo's own folder (``fedfm silo predictions``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedfm.core.capabilities import PREDICTIONS
from fedfm.core.text import visible
from fedfm.runtime.client_memory import Store
from fedfm.sites import silo_config

_RUNS = ".fedfm/runs"  # folder next to the silo's file, see fedfm.engines.flower.client_stub


def report(path: Path) -> dict[str, Any]:
    """Return the output of ``fedfm silo predictions``: for each run, the oldest first, one record per row.

    Raises:
        InputError: the silo's file is wrong.
    """
    silo, found = silo_config.load(path), []
    folders = [p for p in (path.resolve().parent / _RUNS).glob("*/silo/memory") if p.is_dir()]
    for folder in sorted(folders, key=lambda p: p.stat().st_mtime_ns):
        store = Store(folder, silo.name)
        if PREDICTIONS in store:
            lines = [json.loads(line) for line in store[PREDICTIONS].decode().splitlines()]
            found.append({"run": folder.parent.parent.name, "predictions": lines})
    return {"name": silo.name, "runs": found}


def render(found: Mapping[str, Any]) -> str:
    """Format the result of :func:`report` as text."""
    lines = []
    for run in found["runs"]:
        lost = sum(line["prediction"] is None for line in run["predictions"])
        without = f", {lost} without a prediction" if lost else ""
        lines.append(f"{visible(run['run'])}: {len(run['predictions'])} rows{without}")
        for number, line in enumerate(run["predictions"]):
            name = visible(str(line.get("file", number)))
            said = line["probabilities"]  # null for a row that left the intervals of the server's model
            lines.append(f"{name}\t{visible(line['prediction'])}\t{max(said):.3f}" if said else f"{name}\t-")
    return "\n".join(lines or ["no run has left predictions here"])
