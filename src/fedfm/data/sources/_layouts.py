"""Recognise common layouts of instructions by their column names, if a layout can be read in only one way.

The layouts are ShareGPT's conversations; prompt and completion; and Dolly's context and response. A name that the user
set is never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedfm.core import tasks
from fedfm.data.spec import DataSpec

# key of the [data] table -> other usual names of this column; the first name that exists is used
_OTHER_NAMES = {
    "messages": ("conversations", "conversation"),
    "instruction": ("prompt",),
    "output": ("completion", "response"),
    "input": ("context",),
}
_UNSET = DataSpec()


def resolve(columns: Mapping[str, Any], spec: DataSpec, task: str | None) -> tuple[DataSpec, tuple[str, ...]]:
    """Return (the settings with the column names of a recognised layout, a notice about these names)."""
    of = tasks.task_named(task)
    if (of is not None and not of.answers) or (of is None and spec.text in columns):
        return spec, ()
    compared = {spec.column("chosen"), spec.column("rejected")} <= columns.keys()
    compared = compared or (of is not None and of.texts_a_row > 1)
    found = _of_preferences(columns, spec) if compared else _of_answers(columns, spec, task)
    if not found:
        return spec, ()
    words = ", ".join(f'data.{key} = "{name}"' for key, name in found.items())
    named: dict[str, Any] = dict(found)
    return replace(spec, **named), (f"the columns are read as if the experiment had {words}",)


def _of_preferences(columns: Mapping[str, Any], spec: DataSpec) -> dict[str, str]:
    """The column names of a layout of preferences in which the instruction column holds the prompts."""
    missing = spec.column("prompt") == _UNSET.column("prompt") and spec.column("prompt") not in columns
    return {"prompt": spec.column("instruction")} if missing and spec.column("instruction") in columns else {}


def _of_answers(columns: Mapping[str, Any], spec: DataSpec, task: str | None) -> dict[str, str]:
    """The column names of a layout of conversations or instructions; rows to predict need no column of answers."""
    asked = {spec.column("messages"), spec.column("instruction")} & columns.keys()
    if not asked and (found := _other(columns, spec, "messages")):
        return found
    if spec.column("messages") in columns:
        return {}
    found = _other(columns, spec, "instruction") | _other(columns, spec, "output")
    complete = all(key in found or spec.column(key) in columns for key in ("instruction", "output"))
    if not found or not (complete or (task is not None and "instruction" in found)):
        return {}
    return found if "instruction" in found else found | _other(columns, spec, "input")


def _other(columns: Mapping[str, Any], spec: DataSpec, key: str) -> dict[str, str]:
    """{key: other name} if only a column with another usual name exists for this key; else {}."""
    if spec.column(key) != _UNSET.column(key) or spec.column(key) in columns:
        return {}
    return next(({key: name} for name in _OTHER_NAMES[key] if name in columns), {})
