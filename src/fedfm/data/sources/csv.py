"""CSV files: UTF-8, commas, column names in the first row, quotes as in RFC 4180."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from fedfm.data.sources._files import At, decode, listing, read_bytes
from fedfm.data.sources._tabular import to_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError


def read(path: Path, spec: DataSpec, *, task: str | None = None, labelled: bool = True) -> Table:
    """Table of a CSV file.

    Raises:
        InputError: not UTF-8, an open quote, rows of unequal length, or as of ``to_table``.
    """
    columns, at = columns_of(path)
    return to_table(columns, spec, source=str(path), at=at, task=task, labelled=labelled)


def columns_of(path: Path) -> tuple[dict[str, list[str]], At]:
    """The columns by name, and a function that names a row in messages (the row of names is row 1)."""
    text = decode(read_bytes(path, "a CSV file"), path, "a CSV file")
    # Python's reader, not a faster one: only it says in which record a quote is open or a field is missing.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[list[str]] = []
    ends: list[int] = []  # the line on which each record ends: a quoted field may span lines
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB would refuse long texts
    try:
        for row in reader:
            rows.append(row)
            ends.append(reader.line_num)
    except csv.Error as error:
        _check_commas(path, text.lstrip().partition("\n")[0])
        start = ends[-1] + 1 if ends else 1
        where = _where(path, len(rows) + 1, start)
        if "unexpected end of data" in str(error):
            raise InputError(
                f'{where}: a quote (") is opened here and never closed: '
                'close it, and write a quote inside a field as ""'
            ) from None
        raise InputError(
            f'{where}: {error}: a field with a comma or a quote stands between quotes, a quote inside it as ""'
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
    if len(names) == 1:
        _check_commas(path, names[0])
    if len(rows) == 1:
        raise InputError(f"{path} holds column names ({listing(names)}) and no rows")
    for index, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            where = _where(path, index, ends[index - 2] + 1)
            what = f"{len(row)} field{'s' if len(row) != 1 else ''}" if row else "an empty line"
            raise InputError(
                f"{where}: {what} where row 1 names {len(names)} ({listing(names, 6)}): "
                "quote fields that hold commas, fill or remove the row"
            )

    def at(index: int) -> str:
        return _where(path, index + 2, ends[index] + 1)

    return {name: list(cells) for name, cells in zip(names, zip(*rows[1:], strict=True), strict=True)}, at


def _check_commas(path: Path, head: str) -> None:
    """Raise an InputError if another mark than commas separates the column names."""
    for mark, word in ((";", "semicolons"), ("\t", "tabs")):
        if mark in head and "," not in head:
            raise InputError(f"{path}, row 1: fields seem to be separated by {word}: save the file with commas")


def _where(path: Path, row: int, line: int) -> str:
    """The row as in a spreadsheet, with the line if quoted line breaks change its number."""
    return f"{path}, row {row}" + (f" (line {line})" if line != row else "")
