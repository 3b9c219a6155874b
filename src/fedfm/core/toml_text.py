"""TOML as text: set keys, write tables, refuse keys that are too deep. It imports no large library."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedfm.errors import InputError

_DEEPEST = 32  # largest number of parts of a dotted key in an experiment
_ENDS = frozenset("\n=,{}[]")  # characters that end a key, outside of quotes
# Quoted texts and comments, in which dots and the characters of _ENDS have no meaning. Each alternative matches up to
# the end of a text even if the closing quotes are missing, so that no character is read twice.
_QUOTED = re.compile(
    r"""\"{3}(?:[^"\\]|\\.|\"{1,2}(?!\"))*\"{0,5}
    | '{3}(?:[^']|'{1,2}(?!'))*'{0,5}
    | "(?:[^"\\\n]|\\.)*"?
    | '[^'\n]*'?
    | \#[^\n]*""",
    re.VERBOSE | re.DOTALL,
)


def put(table: dict[str, Any], key: str, value: Any) -> None:
    """Set ``a.b.c`` in nested tables."""
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise InputError(f"--set {key}: {part} is not a table")
    table[last] = value


def to_toml(tables: Mapping[str, Any]) -> str:
    """Nested tables as TOML: one section per table, deeper tables inline. Keys without a value are left out."""
    top = _lines({key: value for key, value in tables.items() if not isinstance(value, Mapping)})
    for section, table in tables.items():
        if isinstance(table, Mapping):
            top += ["", f"[{to_key(section)}]", *_lines(table)]
    return "\n".join(top).strip() + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{to_key(key)} = {to_inline(value)}" for key, value in table.items() if value is not None]


def to_inline(value: Any) -> str:
    """A value as TOML in one line.

    JSON differs from TOML in three ways: it escapes by pairs of surrogates, leaves DEL as it is, and writes Infinity.

    Example:
        >>> to_inline({"é": ["a", 1.5, True, float("inf")]})
        '{ "é" = ["a", 1.5, true, inf] }'
    """
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_lines(value)) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(to_inline, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def to_key(key: str) -> str:
    """One part of a key as TOML."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else to_inline(key)


def copy_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with separate tables; values are shared."""
    return {key: copy_tables(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def leaves(table: Mapping[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(keys from the outermost table inwards, value) of each value that is not a table."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*at, key))
        else:
            yield (*at, key), value


def check_depth(text: str) -> None:
    """Refuse TOML with a dotted key of many parts: the time to read it grows with the square of their number.

    Raises:
        InputError: the text has such a key.
    """
    parts = 0
    for piece in _QUOTED.sub("_", text).split("."):
        parts = parts + 1 if _ENDS.isdisjoint(piece) else 0
        if parts > _DEEPEST:
            raise InputError(f"the experiment has a key of more than {_DEEPEST} parts")
