"""Find the remaining faults of a file, after one reading has reported some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from fedfm.core.toml_text import copy_tables
from fedfm.errors import Absent, FaultyFile, InputError

MOST = 50  # faults of one file that are shown
Tables = Mapping[str, Any]


def all_of(
    path: str | Path,
    table: Tables,
    read: Callable[[Tables], object],
    each: Iterable[Callable[[Tables], object]],
    error: InputError,
) -> FaultyFile:
    """All faults of a file, one per line with the file's name, after one reading has reported some of them.

    Args:
        each: as in :func:`fedfm.config.faults.read_all`.
        error: the error of that reading.
    """
    found = [fault for fault in error.all if fault is error or _is_own(table, fault)]
    for alone in each:
        _add_of_one(table, alone, found)
    _add_others(table, read, found)
    lines = [f"{path}: {fault}" for fault in found[:MOST]]
    if len(found) > MOST:
        lines.append(f"{path}: {len(found) - MOST} more faults")
    return FaultyFile("\n".join(lines), found)


def _add(found: list[InputError], faults: Iterable[InputError]) -> None:
    """Add the faults of another reading, except at keys with a known fault: readers word the same fault differently."""
    known = {fault.key for fault in found}
    found += [fault for fault in faults if fault.key not in known]


def _add_of_one(table: Tables, alone: Callable[[Tables], object], found: list[InputError]) -> None:
    """Add the faults of one table."""
    try:
        alone(table)
    except InputError as error:
        _add(found, (fault for fault in error.all if _is_own(table, fault)))


def _add_others(table: Tables, read: Callable[[Tables], Any], found: list[InputError]) -> None:
    """Add the faults that remain once the values at fault are removed."""
    rest, latest = copy_tables(table), list(found)
    while len(found) < MOST and _take_out(rest, latest):
        try:
            read(rest)
            return
        except InputError as error:
            latest = [f for f in error.all if _owner(rest, f) is not None and not _follows(f, found)]
            _add(found, latest)


def _follows(fault: InputError, found: Iterable[InputError]) -> bool:
    """Whether a fault of a whole table may follow from the removal of one of its keys."""
    return any(known.key.startswith(f"{fault.key}.") for known in found)


def _is_own(table: Tables, fault: InputError) -> bool:
    """Whether the file has the key of the fault, or should have it.

    Other faults do not count: they may be about defaults that follow from a wrong value.
    """
    return not fault.key or isinstance(fault, Absent) or _owner(table, fault) is not None


def _take_out(table: Tables, faults: Iterable[InputError]) -> bool:
    """Remove the keys of the faults; return whether at least one was removed, so that the rest can be read again."""
    removed = False
    for fault in faults:
        if (place := _owner(table, fault)) is None:
            continue
        owner, key, path = place
        if key == "name" and len(path) > 1:  # the name decides which other keys its table takes
            owner, key, path = _inner(table, path[:-2]), path[-2], path[:-1]
        if len(path) == 1 and path[0] in ("data", "model", "method") and isinstance(owner[key], Mapping):
            continue
        del owner[key]
        removed = True
    return removed


def _owner(table: Tables, fault: InputError) -> tuple[MutableMapping[str, Any], str, list[str]] | None:
    """(table, key, path) of the value at fault; None if the file has no such key."""
    path = fault.key.partition("[")[0].split(".")  # for an entry of a list, the path of the list
    try:
        owner = _inner(table, path[:-1])
    except (KeyError, TypeError):
        return None
    return (owner, path[-1], path) if isinstance(owner, MutableMapping) and path[-1] in owner else None


def _inner(table: Any, path: list[str]) -> Any:
    for key in path:
        table = table[key]
    return table
