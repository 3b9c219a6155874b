"""Notices about feature vectors: numbers that stand for missing values, and columns that reveal the label."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedfm.data.table import Table

# Numbers that files write where a value is missing
_MARKS = (*(s * n for n in (99, 999, 9999, 99999, 999999) for s in (-1, 1)), -9, -998, -9998, -32768, 32767, 65535)
_FILLS = 1e15  # recurring numbers of at least this size are fill values, such as 1e20, 9.97e36 and -3.4e38
_TIMES = 3  # smallest number of rows in which a mark of missing values recurs
_SHARE = 0.005  # smallest share of rows in which such a mark recurs
_DISTINCT = 3  # with fewer distinct values other than marks, a column has no known range
_MANY = 20  # with fewer rows a column may match the label by chance
_A_CLASS = 3  # with fewer rows per class on average, a column may match the label by chance
_STEPS = 0.9  # smallest share of rows whose number is one more than the previous row's; each file may start again
_PIECE = 1 << 22  # number of values that are compared at a time


def notices(table: Table) -> tuple[str, ...]:
    """All notices about feature vectors; only the notice about columns that reveal the label needs labels."""
    if not len(table):
        return ()
    return tuple(text for text in (_missing_values(table), _label_columns(table), _row_numbers(table)) if text)


def _missing_values(table: Table) -> str | None:
    """A notice about columns in which a usual mark of missing values recurs, far outside the column's other values."""
    x: np.ndarray = table.inputs
    low, high = x.min(0), x.max(0)
    found = [(j, marks) for j in np.flatnonzero(_is_mark(low) | _is_mark(high)) if (marks := marks_of(x[:, j]))]
    if not found:
        return None
    j, marks = found[0]
    column = x[:, j]
    rest = column[~np.isin(column, marks)]
    rows = int(np.isin(column, marks).sum())
    more = f", and likewise in other columns ({len(found) - 1})" if len(found) > 1 else ""
    return (
        f"{table.source}: column x[:, {j}] is {' or '.join(f'{m:g}' for m in marks)} in {rows} of {len(column)} rows, "
        f"and otherwise from {rest.min():.4g} to {rest.max():.4g}{more}: if that marks a missing value, replace it, or "
        "leave these rows out, since it is read as a number"
    )


def _is_mark(values: np.ndarray) -> np.ndarray:
    """Whether each value is a number that usually marks missing values."""
    found: np.ndarray = np.isin(values, np.array(_MARKS, np.float32)) | (np.abs(values) >= _FILLS)
    return found


def marks_of(column: np.ndarray) -> list[float]:
    """The marks of missing values (N,) in a column; only its smallest and its largest value can be marks."""
    marks = [float(v) for v in {column.min(), column.max()} if _is_mark(np.array([v]))[0]]
    rest = column[~np.isin(column, marks)]
    if len(np.unique(rest[:_PIECE])) < _DISTINCT:
        return []
    low, high = float(rest.min()), float(rest.max())
    return sorted(mark for mark in marks if _far(mark, low, high) and _recurs(column, mark))


def _far(mark: float, low: float, high: float) -> bool:
    """Whether a mark lies outside low..high by more than high - low, or far below 0 although no value is negative."""
    return max(low - mark, mark - high) > high - low or (low >= 0 and mark <= -100)


def _recurs(column: np.ndarray, mark: float) -> bool:
    return int((column == mark).sum()) >= max(_TIMES, _SHARE * len(column))


def _label_columns(table: Table) -> str | None:
    """A notice about columns that are constant within each class and differ between the classes."""
    if table.labels is None:
        return None
    of, first, labels = np.unique(table.labels, return_index=True, return_inverse=True)
    if len(of) < 2 or len(table) < max(_MANY, _A_CLASS * len(of)):
        return None
    x: np.ndarray = table.inputs
    columns = np.arange(x.shape[1])
    for rows in _pieces(len(table), x.shape[1]):
        columns = columns[(x[rows][:, columns] == x[first[labels[rows]]][:, columns]).all(0)]
        if not len(columns):
            return None
    kept = x[first][:, columns]  # (C, columns): the value of each class
    columns = columns[(kept != kept[:1]).any(0)]
    if not len(columns) or len(np.unique(x[first][:, columns], axis=0)) < len(of):
        return None
    single = [j for j in columns if len(np.unique(x[first, j])) == len(of)]
    which = f"column x[:, {single[0]}]" if single else f"columns x[:, {columns[0]}] to x[:, {columns[-1]}]"
    more = f", as do other columns ({len(single) - 1})" if len(single) > 1 else ""
    return (
        f"{table.source}: {which} alone tell{'s' if single else ''} the class of each row{more}: if the label is among "
        "the features, remove it, since a result then says nothing"
    )


def _row_numbers(table: Table) -> str | None:
    """A notice about a column that numbers the rows, like the index of a data frame."""
    x: np.ndarray = table.inputs
    if len(x) < _MANY:
        return None
    ahead = np.flatnonzero((np.diff(x[:_MANY], axis=0) == 1).all(0))
    found = [j for j in ahead if (np.diff(x[:, j].astype(np.float64)) == 1).mean() >= _STEPS]
    if not found:
        return None
    return (
        f"{table.source}: column x[:, {found[0]}] numbers the rows, from {x[:, found[0]].min():g} to "
        f"{x[:, found[0]].max():g}: if it is an index, remove it, since a model may learn the order of the rows"
    )


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows; the first is small, since it rules out most columns."""
    step = max(_PIECE // max(width, 1), 1)
    start, size = 0, _MANY
    while start < rows:
        yield slice(start, start + size)
        start, size = start + size, step
