"""One file for several methods: ``--set method.name=...`` leaves out keys that only the file's method takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedfm.config.key_suggestions import UnknownKey
from fedfm.config.registry import admit_named
from fedfm.config.toml import build_named
from fedfm.core.fields import check
from fedfm.core.toml_text import copy_tables
from fedfm.errors import InputError


def without_former_keys(
    tables: dict[str, Any], former: Mapping[str, Any], given: Collection[str], tell: Callable[[str], None]
) -> dict[str, Any]:
    """The tables of an experiment without those keys of [method] that only the replaced method takes.

    Keys that no method takes stay, and so do keys of the command line. The reader of the experiment refuses both.

    Args:
        former: the file's [method] table.
        given: keys that the command line sets, as ``method.rounds``.
        tell: receives a line for each key that is left out.
    """
    name = tables["method"].get("name")
    if former.get("name") == name or _refusal(former) is not None:
        return tables
    method = copy_tables(tables["method"])
    while (why := _refusal(method)) is not None:
        section, *path = why.key.split(".")
        if section != "method" or not _has(former, path) or any(f"{key}.".startswith(f"{why.key}.") for key in given):
            break  # the reader of the experiment reports the fault
        inner = method
        for part in path[:-1]:
            inner = inner[part]
        if path[-1] not in inner:
            break
        del inner[path[-1]]
        reason = f"unknown key{why.hint}" if isinstance(why, UnknownKey) else why.reason()
        tell(f'{why.key} of the file is left out: method "{name}" does not take it ({reason})')
    return {**tables, "method": method}


def _refusal(method: Mapping[str, Any]) -> InputError | None:
    try:
        admit_named({"method": method})
        found = build_named("methods", method, "method")[1]
        check(found, "method")
        found.validate()
    except InputError as error:
        return error
    return None


def _has(table: Any, path: list[str]) -> bool:
    for part in path:
        if not isinstance(table, Mapping) or part not in table:
            return False
        table = table[part]
    return bool(path)
