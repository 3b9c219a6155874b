"""Read CSV (commas, semicolons or tabs) and TSV: column names in the first row, quotes as in RFC 4180."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path
from typing import Literal

from fedfm.core.text import listing
from fedfm.data.sources._files import At, decode
from fedfm.data.sources._sheet import Sheet
from fedfm.errors import InputError

Columns = dict[str, list[str]]
_NAMES = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_STATED = re.compile(r'"?sep=(.)"?[ \t]*\r?\n', re.IGNORECASE)  # Excel's first line, which states the separator
_FORM = 2  # smallest number of fields of a line that looks like a row
_LINES = (
    '{at} has lines inside a field that look like rows of their own{more}: was a quote (") opened there by mistake?'
)
_MARKS = (";", "\t", "|")  # separators of fields if there is no comma


def sheet_of(data: bytes, path: Path) -> Sheet:
    """The sheet of a CSV file. Fields are separated by commas, or by the separator of the column names.

    Raises:
        InputError: the file is neither UTF-8 nor UTF-16, a quote is not closed, or rows differ in length.
    """
    text = decode(data, path, "a CSV file")
    if stated := _STATED.match(text):
        if (mark := stated[1]) not in _NAMES:
            raise InputError(f"{path}, line 1: sep={mark}: expected one of {listing(_NAMES)}")
        text = text[stated.end() :]
    else:
        mark = _mark_of(text.lstrip("\r\n").partition("\n")[0])
    columns, at, notices = _read(text, path, mark)
    if rows := _rows_with_lines(columns, mark):
        notices += (_LINES.format(at=at(rows[0]), more=_and_more(rows)),)
    if mark != ",":
        notices += (f"{path} is read with {_NAMES[mark]}s between its fields, as in its first row",)
    return Sheet(columns, at, notices)


def sheet_of_tabs(data: bytes, path: Path) -> Sheet:
    """The sheet of a TSV file. Quotes are read as marks around fields or, if that fails, as text.

    Raises:
        InputError: as :func:`sheet_of`.
    """
    text = decode(data, path, "a TSV file")
    note = f'the quotes (") in {path} are read as text'
    try:
        columns, at = _columns_of(text, path, "\t")
    except InputError:
        if '"' not in text:
            raise
        return Sheet(*_columns_of(text, path, "\t", quotes=False), (note,))
    if rows := _rows_with_lines(columns, "\t"):
        try:
            return Sheet(*_columns_of(text, path, "\t", quotes=False), (note,))
        except InputError:  # reading the quotes as text fails, so they are marks
            return Sheet(columns, at, (_LINES.format(at=at(rows[0]), more=_and_more(rows)),))
    return Sheet(columns, at)


def _and_more(rows: list[int]) -> str:
    return f" (further rows of this kind: {len(rows) - 1})" if len(rows) > 1 else ""


def _mark_of(head: str) -> str:
    """The separator between column names: a comma, or another mark if there is no comma."""
    bare = "".join(head.split('"')[::2])  # text between quotes has no separators
    found = [mark for mark in _MARKS if mark in bare]
    return found[0] if "," not in bare and len(found) == 1 else ","


def _read(text: str, path: Path, mark: str) -> tuple[Columns, At, tuple[str, ...]]:
    """As :func:`_columns_of`, with a notice if blanks between a separator and a quote were left out."""
    if re.search(rf'(?:^|{re.escape(mark)}) +"', text, re.MULTILINE) is None:
        return *_columns_of(text, path, mark), ()
    try:
        columns, at = _columns_of(text, path, mark, blanks=False)
    except InputError:  # the quotes belong to the texts
        return *_columns_of(text, path, mark), ()
    note = f'the blanks between a {_NAMES[mark]} and a quote (") in {path} are left out'
    try:
        plain, _ = _columns_of(text, path, mark)
    except InputError:
        return columns, at, (note,)
    same = all([cell.lstrip(" ") for cell in cells] == columns[name] for name, cells in plain.items())
    return (plain, at, ()) if same else (columns, at, (note,))


def _rows_with_lines(columns: Columns, mark: str) -> list[int]:
    """Indexes of rows that seem to contain other rows: a quote was opened by mistake, and a later quote closes it.

    Such a row has a field that spans several lines. One of these lines looks like a row of its own, and its last field
    is a value that occurs in the last column.
    """
    if len(columns) < _FORM:
        return []
    first, *_, last = columns
    values = set(columns[last]) - {""}

    def holds_row(cell: str, start: int) -> bool:
        lines = (line.split(mark) for line in cell.splitlines()[start:-1])
        return any(len(fields) == len(columns) and fields[-1] in values for fields in lines)

    return sorted(
        {
            i
            for name, cells in columns.items()
            for i, cell in enumerate(cells)
            if "\n" in cell and holds_row(cell, 0 if name == first else 1)  # a field of column 1 begins a line
        }
    )


def _columns_of(text: str, path: Path, mark: str, *, quotes: bool = True, blanks: bool = True) -> tuple[Columns, At]:
    """Return (columns by name, function that names a row in messages); the row of column names is row 1.

    Args:
        quotes: whether quotes enclose fields; if not, they are text.
        blanks: whether blanks at the beginning of a field are part of it.
    """
    # Python's reader is slow, but only it reports the record with an open quote or a missing field.
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    reader = csv.reader(
        io.StringIO(text, newline=""), strict=True, delimiter=mark, quoting=quoting, skipinitialspace=not blanks
    )
    rows: list[list[str]] = []
    ends: list[int] = []  # the line on which each record ends: a quoted field may span lines
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB would refuse long texts
    try:
        for row in reader:
            rows.append(row)
            ends.append(reader.line_num)
    except csv.Error as error:
        start = ends[-1] + 1 if ends else 1
        where = _where(path, len(rows) + 1, start)
        if "unexpected end of data" in str(error):
            raise InputError(
                f'{where}: a quote (") is opened here and never closed: '
                'close it, and write a quote inside a field as ""'
            ) from None
        raise InputError(
            f"{where}: {error}: put a field with a {_NAMES[mark]} or quote between quotes, and write inner quotes twice"
        ) from None
    finally:
        csv.field_size_limit(limit)
    while rows and not rows[-1]:  # blank lines at the end
        rows.pop()
    names = [name.strip() for name in rows[0]] if rows else []
    if not any(names):
        raise InputError(f"{path}, row 1: no column names")
    for name in names:
        if name and names.count(name) > 1:
            raise InputError(f'{path}, row 1: column "{name}" occurs {names.count(name)} times: names must differ')
    if len(rows) == 1:
        raise InputError(f"{path} holds column names ({listing(names)}) and no rows")
    for index, row in enumerate(rows[1:], 2):
        if row == rows[0] and len(row) >= _FORM:
            where = _where(path, index, ends[index - 2] + 1)
            raise InputError(f"{where} repeats the column names, perhaps since files were joined: remove the row")
        if len(row) != len(names):
            where = _where(path, index, ends[index - 2] + 1)
            what = f"{len(row)} field{'s' if len(row) != 1 else ''}" if row else "an empty line"
            raise InputError(
                f"{where}: {what} where row 1 names {len(names)} ({listing(names, 6)}): "
                f"put fields with {_NAMES[mark]}s in quotes, or fill or remove the row"
            )

    def at(index: int) -> str:
        return _where(path, index + 2, ends[index] + 1)

    return {name: list(cells) for name, cells in zip(names, zip(*rows[1:], strict=True), strict=True)}, at


def _where(path: Path, row: int, line: int) -> str:
    """The path and the row's number as in a spreadsheet, and the line's number if line breaks in quotes shift it."""
    return f"{path}, row {row}" + (f" (line {line})" if line != row else "")
