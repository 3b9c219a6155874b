"""A sheet: the columns of one file, before they are interpreted."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fedfm.data.arrow_texts import ArrowPictures
from fedfm.data.sources._files import At
from fedfm.errors import InputError

_HALF = re.compile("[\ud800-\udfff]")  # a surrogate: half of a UTF-16 pair
ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of a surrogate; complete pairs match, too


@dataclass(frozen=True)
class Sheet:
    """Columns of N rows.

    Attributes:
        columns: name -> N values.
        at: maps a row's index to its name in messages.
        notices: sentences for the user about how the file was read.
        names: name of a column of integers -> the names of the classes that they number, if the file has such names.
    """

    columns: Mapping[str, Sequence[Any]]
    at: At
    notices: tuple[str, ...] = ()
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def of_rows(rows: Sequence[Mapping[str, Any]], at: At, *, repairs: Sequence[int] = ()) -> Sheet:
    """Make a sheet from JSON objects, one per row; a row has None for each key that it lacks.

    Args:
        repairs: indexes of the rows in which lone surrogates were replaced.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in keys}
    more = f" (and {len(repairs) - 1} more)" if len(repairs) > 1 else ""
    note = (
        f"{at(repairs[0])}{more}: half a character (a lone surrogate, from a text that was cut) is replaced by "
        "U+FFFD, the mark of an unreadable character"
        if repairs
        else ""
    )
    return Sheet(columns, at, (note,) if note else ())


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict from the pairs of a JSON object; Python's reader alone would keep the last value of a repeated key.

    Raises:
        ValueError: a key occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, count), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'the key "{name}" occurs {count} times in one object')
    return found


def whole(value: Any) -> Any:
    r"""A JSON value with U+FFFD in place of each lone half of a UTF-16 pair, since tokenizers cannot read these.

    Example:
        >>> whole({"text": "a\ud83d b"}) == {"text": "a\ufffd b"}
        True
    """
    if isinstance(value, str):
        return _HALF.sub("\ufffd", value)
    if isinstance(value, list):
        return [whole(v) for v in value]
    if isinstance(value, dict):
        return {whole(k): whole(v) for k, v in value.items()}
    return value


def without_nulls(value: Any) -> Any:
    """A value from Arrow without its null fields, since Arrow gives each object the fields of all objects in a column.

    Example:
        >>> without_nulls([{"a": 1, "b": None}, {"a": None, "b": {"c": None}}])
        [{'a': 1}, {'b': {}}]
    """
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    if isinstance(value, dict):
        return {key: without_nulls(v) for key, v in value.items() if v is not None}
    return value


def join(sheets: Mapping[str, Sheet]) -> Sheet:
    """Join the rows of several files, one file after the other.

    Args:
        sheets: file -> its sheet.

    Raises:
        InputError: the files' columns or class names differ.
    """
    (first, head), *rest = sheets.items()
    for file, sheet in rest:
        if missing := [
            name for name in (*head.columns, *sheet.columns) if (name in head.columns) != (name in sheet.columns)
        ]:
            has, lacks = (first, file) if missing[0] in head.columns else (file, first)
            raise InputError(f'{lacks} has no column "{missing[0]}", which {has} has: files of one set must agree')
        if dict(sheet.names) != dict(head.names):
            raise InputError(
                f"{file} and {first} name their classes differently: files of one set must have the same columns"
            )
    parts = list(sheets.values())
    columns: dict[str, Sequence[Any]] = {}
    for name, values in head.columns.items():
        others = [part.columns[name] for part in parts[1:]]
        if isinstance(values, ArrowPictures) and all(isinstance(o, ArrowPictures) for o in others):
            columns[name] = values.join([o for o in others if isinstance(o, ArrowPictures)])
        else:
            columns[name] = [v for some in (values, *others) for v in some]
    ends = list(accumulate(map(len, parts)))

    def at(row: int) -> str:
        part = bisect.bisect_right(ends, row)
        return parts[part].at(row - (ends[part - 1] if part else 0))

    return Sheet(columns, at, tuple(dict.fromkeys(n for part in parts for n in part.notices)), head.names)
