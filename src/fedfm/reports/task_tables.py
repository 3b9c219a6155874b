"""The section with a task's own tables of scores."""

from __future__ import annotations

from typing import cast

from fedfm.models.model_task import ModelTask
from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, sequence
from fedfm.reports.text import esc


def section(run: RunFiles) -> str:
    """The tables that the run's task makes of its scores; empty if it makes none."""
    classes = [str(name) for name in sequence(mapping(run.manifest.get("model")).get("classes"))]
    found = cast(ModelTask, run.task).tables(mapping(run.result.get("details")), classes)
    parts = ((f"<h3>{esc(of.title)}</h3>", table(of.head, of.rows, of.title), note(esc(of.note))) for of in found)
    return "".join(text for some in parts for text in some)
