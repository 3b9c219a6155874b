"""All faults of a file at once: each is taken out, and what is left is read again.

The first fault is what a reader of the whole file meets. A later one counts only if the file has its key: what follows
from something that was taken out is no fault of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

from fedfm.config.replaced import copy_tables
from fedfm.errors import InputError

T = TypeVar("T")
_MOST = 50  # faults of one file
_KEY = re.compile(r"\[?([A-Za-z_]\w*(?:\.\w+)*)\]?(?=[:\[ ]|$)")  # with which a message begins


def read_all(path: str | Path, table: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    """What ``read`` makes of the tables of a file.

    Raises:
        InputError: all faults, a line each, with the file's name.
    """
    try:
        return read(table)
    except InputError as error:
        found = [error, *_others(table, read, error)]
        raise InputError("\n".join(f"{path}: {fault}" for fault in found)) from None


def _others(table: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any], first: InputError) -> list[InputError]:
    """Faults that are left once the first one is taken out."""
    rest, error, found = copy_tables(table), first, list[InputError]()
    while len(found) < _MOST and _take_out(rest, str(error)):
        try:
            read(rest)
            break
        except InputError as other:
            if _owner(rest, str(other)) is None:
                break
            error = other
            found.append(other)
    return found


def _take_out(table: dict[str, Any], message: str) -> bool:
    """Remove the key with which a message begins; whether it was there and the rest can be read without it."""
    if (place := _owner(table, message)) is None:
        return False
    owner, key, path = place
    if key == "name" and len(path) > 1:  # it decides which keys stand beside it
        owner, key, path = _inner(table, path[:-2]), path[-2], path[:-1]
    if len(path) == 1 and path[0] in ("data", "model", "method"):
        return False
    del owner[key]
    return True


def _owner(table: dict[str, Any], message: str) -> tuple[MutableMapping[str, Any], str, list[str]] | None:
    """(table, key, path) of what a message is about; None where the file has no such key."""
    if (begins := _KEY.match(message)) is None:
        return None
    path = begins[1].split(".")
    try:
        owner = _inner(table, path[:-1])
    except (KeyError, TypeError):
        return None
    return (owner, path[-1], path) if isinstance(owner, MutableMapping) and path[-1] in owner else None


def _inner(table: Any, path: list[str]) -> Any:
    for key in path:
        table = table[key]
    return table
