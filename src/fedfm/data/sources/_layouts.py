"""Layouts of instructions in other names than ours: which columns hold what, where only one answer is possible.

ShareGPT's conversations, prompt and completion, and Dolly's context and response. A name that the user has set is
never replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fedfm.data.spec import DataSpec

# key of the [data] table -> other names of such a column, the first of which that is there is taken
_OTHER_NAMES = {
    "messages": ("conversations", "conversation"),
    "instruction": ("prompt",),
    "output": ("completion", "response"),
    "input": ("context",),
}
_DEFAULTS = {field.name: field.default for field in fields(DataSpec)}


def named(columns: Mapping[str, Any], spec: DataSpec, task: str | None) -> tuple[DataSpec, tuple[str, ...]]:
    """The names of the columns of instructions and conversations, and a notice of those that were found by a layout."""
    if task not in (None, "instruction") or (task is None and spec.text in columns):
        return spec, ()
    found: dict[str, str] = {}
    if not {spec.messages, spec.instruction} & columns.keys():
        found |= _other(columns, spec, "messages")
    if not found and spec.messages not in columns:
        pair = {key: name for key in ("instruction", "output") for name in _other(columns, spec, key).values()}
        there = all(key in pair or getattr(spec, key) in columns for key in ("instruction", "output"))
        if there or (task == "instruction" and "instruction" in pair and spec.chosen not in columns):
            found |= pair
            asked = found.get("instruction", spec.instruction)
            if asked != "prompt":
                found |= _other(columns, spec, "input")
    if not found:
        return spec, ()
    words = ", ".join(f'data.{key} = "{name}"' for key, name in found.items())
    return replace(spec, **found), (f"the columns are read as with {words}",)


def _other(columns: Mapping[str, Any], spec: DataSpec, key: str) -> dict[str, str]:
    """The key with another name of its column, if the default's is not there."""
    if getattr(spec, key) != _DEFAULTS[key] or _DEFAULTS[key] in columns:
        return {}
    return next(({key: name} for name in _OTHER_NAMES[key] if name in columns), {})
