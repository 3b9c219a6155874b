"""The section with a task's own tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

from fedfm.core.fields import key_of
from fedfm.core.task_facts import TaskFacts
from fedfm.models.model_task import ModelTask
from fedfm.reports import score_plots
from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, sequence
from fedfm.reports.text import esc


def section(run: RunFiles) -> str:
    """The tables that the run's task makes of its scores; empty if it makes none."""
    classes = [str(name) for name in sequence(mapping(run.manifest.get("model")).get("classes"))]
    details = mapping(run.result.get("details"))
    found = cast(ModelTask, run.task).tables(details, classes)
    parts = ((f"<h3>{esc(of.title)}</h3>", table(of.head, of.rows, of.title), note(esc(of.note))) for of in found)
    return _plots(run, run.task, details, classes) + "".join(text for some in parts for text in some)


def _plots(run: RunFiles, named: TaskFacts, details: Mapping[str, object], classes: Sequence[str]) -> str:
    """The plots of the task, after the task's keys have got the values in the manifest."""
    keys = {**mapping(run.experiment.get("model")), **mapping(run.manifest.get("chosen"))}
    known = {f.name: keys[key_of(f.name)] for f in fields(named) if key_of(f.name) in keys}
    task = cast(ModelTask, replace(cast(Any, named), **known))
    return score_plots.drawings(task.plots(details, classes))
