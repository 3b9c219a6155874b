"""Read JSON files: a list of objects, an object with one such list, or JSON lines in a file named ``.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedfm.core.text import listing
from fedfm.data.sources import jsonl
from fedfm.data.sources._files import decode
from fedfm.data.sources._sheet import ESCAPED_HALF, Sheet, each_once, of_rows, whole
from fedfm.errors import InputError

_LIKE = 'a list of objects, such as [{"text": "...", "label": "..."}, ...], is expected'


def sheet_of(data: bytes, path: Path) -> Sheet:
    """The sheet of a JSON file.

    Raises:
        InputError: the file is not JSON, or has no list of objects.
    """
    text = decode(data, path, "a JSON file")
    try:
        found = json.loads(text, object_pairs_hook=each_once)
    except (ValueError, RecursionError) as error:
        if _begins_with_object(text):
            return jsonl.of_lines(text.split("\n"), path)
        where = f"line {error.lineno}, column {error.colno}: " if isinstance(error, json.JSONDecodeError) else ""
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{path}: {where}not JSON ({why})") from None
    notices: tuple[str, ...] = ()
    if isinstance(found, dict):
        key, found = _list_of(found, path)
        notices = (f'the rows of {path} are the list under "{key}"',)
    rows = _objects(found, path)
    repairs: list[int] = []
    if ESCAPED_HALF.search(text):
        fixed = [whole(row) for row in rows]
        repairs = [i for i, (a, b) in enumerate(zip(rows, fixed, strict=True)) if a != b]
        rows = fixed
    sheet = of_rows(rows, lambda i: f"{path}, object {i + 1}", repairs=repairs)
    return Sheet(sheet.columns, sheet.at, (*notices, *sheet.notices))


def _begins_with_object(text: str) -> bool:
    """Whether the first line is a complete object, as in JSON lines."""
    try:
        return isinstance(json.loads(text.lstrip().partition("\n")[0]), dict)
    except (ValueError, RecursionError):
        return False


def _list_of(found: dict[str, Any], path: Path) -> tuple[str, list[Any]]:
    """Return (key, value) of the only list of objects in an object; raise an InputError if there is not exactly one."""
    lists = {key: v for key, v in found.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    if len(lists) != 1:
        one = f"one object, with {listing(list(found), 8) or 'no key'}"
        what = f"several lists ({listing(lists)})" if lists else one
        raise InputError(f"{path} holds {what}: {_LIKE}")
    return next(iter(lists.items()))


def _objects(found: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(found, list):
        raise InputError(f"{path} holds a JSON {type(found).__name__}: {_LIKE}")
    for i, row in enumerate(found, 1):
        if not isinstance(row, dict):
            raise InputError(f"{path}, object {i}: a JSON {type(row).__name__}: {_LIKE}")
    if not any(found):
        raise InputError(f"{path} holds no object with a key: {_LIKE}")
    return found
