"""Select rows of a table, by values of its columns (``data.where``) or by class (``model.base_classes``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedfm.core.text import listing
from fedfm.data.class_names import class_name
from fedfm.data.invisible import escape
from fedfm.data.sources._files import column
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from fedfm.errors import InputError, close

_NAMED = 4  # largest number of values that a notice lists


def filter_rows(table: Table, spec: DataSpec) -> Table:
    """The rows that have, in each column of ``spec.where``, one of the values listed for it.

    Raises:
        InputError: a column does not exist, or is the rows' input or label; or a listed value occurs in no row.
    """
    kept, notices = np.ones(len(table), dtype=bool), table.notices
    for name, values in (spec.where or {}).items():
        if name not in table.columns:
            _refuse_used(table, name, spec)
        of = column(table.columns, name, "data.where", table.source)
        there = sorted(set(of.tolist()))
        for value in values:
            if value not in there:
                raise InputError(
                    f'data.where.{name}: no row of {table.source} has "{value}"; there are {listing(there, 8)}'
                    f"{close(value, there)}"
                )
        kept &= np.isin(of, list(values))
        wanted = set(map(_alike, values))
        if alike := [other for other in there if other not in values and _alike(other) in wanted]:
            count = int(np.isin(of, alike).sum())
            notices += (
                f"data.where.{name}: {count} rows with {', '.join(map(escape, alike[:_NAMED]))} are left out, although "
                f"these values differ only by case or spaces from {listing(values, _NAMED)}",
            )
    table = replace(table, notices=notices)
    return table if kept.all() else table.take(np.flatnonzero(kept))


def _refuse_used(table: Table, name: str, spec: DataSpec) -> None:
    """Refuse a column that another key of [data] reads: it is no longer among the table's further columns."""
    from fedfm.data.partition_columns import key_that_reads

    if (used := key_that_reads(name, spec)) is not None:
        others = listing([*table.columns]) if table.columns else "there are none"
        raise InputError(
            f"data.where.{name}: data.{used} reads this column, and data.where chooses by the other columns "
            f"({others}); add a copy of the column under another name, or leave the rows out of the file",
            key=f"data.where.{name}",
        )


def _alike(value: str) -> str:
    return " ".join(class_name(value).casefold().split())


def drop_new_classes(table: Table, base: int) -> Table:
    """Leave out training and validation rows of new classes. All classes after the first ``base`` are new.

    Raises:
        InputError: the rows have no labels, or at most ``base`` classes.
    """
    if table.labels is None or base >= len(table.classes):
        raise InputError(
            f"model.base_classes = {base}: expected fewer than the {len(table.classes)} classes of {table.source}, "
            "since the other classes are new"
        )
    out = (table.labels >= base) & (table.split != "test")
    note = (
        f"model.base_classes = {base}: {int(out.sum())} training rows of new classes are left out "
        f"({listing(table.classes[base:], 5)})"
    )
    return replace(table.take(np.flatnonzero(~out)), notices=(*table.notices, note))
