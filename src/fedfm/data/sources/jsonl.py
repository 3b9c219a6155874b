"""Read JSON lines: one object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedfm.data.sources._files import decode
from fedfm.data.sources._sheet import ESCAPED_HALF, Sheet, each_once, of_rows, whole
from fedfm.errors import InputError

_LIKE = 'one object per line, such as {"text": "...", "label": "..."}'


def sheet_of(data: bytes, path: Path) -> Sheet:
    """The sheet of JSON lines.

    Raises:
        InputError: the file is neither UTF-8 nor UTF-16, or a line is not a JSON object.
    """
    # splitlines() would also cut at U+2028 and other marks that JSON allows inside strings.
    return of_lines(decode(data, path, "JSON lines").split("\n"), path)


def of_lines(lines: Iterable[str], path: Path) -> Sheet:
    """The sheet of these lines; blank lines are skipped."""
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    repairs: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=each_once)
        except (ValueError, RecursionError) as error:
            why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{path}, line {number}: not JSON ({why}): {_LIKE}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: a JSON {type(row).__name__}, not an object: {_LIKE}")
        if ESCAPED_HALF.search(line) and (fixed := whole(row)) != row:
            repairs.append(len(rows))
            row = fixed
        rows.append(row)
        numbers.append(number)
    if not any(rows):
        raise InputError(f"{path} holds no object with a key")
    return of_rows(rows, lambda i: f"{path}, line {numbers[i]}", repairs=repairs)
