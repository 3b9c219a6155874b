"""Some rows of a table: those with certain values (``data.where``), or of certain classes (``model.base_classes``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedfm.core.text import listing
from fedfm.data.class_names import class_name
from fedfm.data.invisible import escape
from fedfm.data.sources._files import column
from fedfm.data.table import Table
from fedfm.errors import InputError, close

_NAMED = 4  # values in a notice


def filter_rows(table: Table, where: Mapping[str, Sequence[str]]) -> Table:
    """The rows with a listed value in each column of ``where``.

    Raises:
        InputError: there is no such column, or no row has such a value.
    """
    kept, notices = np.ones(len(table), dtype=bool), table.notices
    for name, values in where.items():
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
                f"data.where.{name}: {count} rows with {', '.join(map(escape, alike[:_NAMED]))} are left out, which "
                f"differ only by case or spaces from {listing(values, _NAMED)}",
            )
    table = replace(table, notices=notices)
    return table if kept.all() else table.take(np.flatnonzero(kept))


def _alike(value: str) -> str:
    return " ".join(class_name(value).casefold().split())


def drop_new_classes(table: Table, base: int) -> Table:
    """Leave out training and validation rows of new classes, which are all after the first ``base``.

    Raises:
        InputError: there are no more than ``base`` classes.
    """
    if table.labels is None or base >= len(table.classes):
        raise InputError(
            f"model.base_classes = {base}: expected fewer than the {len(table.classes)} classes of {table.source}, "
            "the others are new"
        )
    out = (table.labels >= base) & (table.split != "test")
    note = (
        f"model.base_classes = {base}: {int(out.sum())} training rows of new classes are left out "
        f"({listing(table.classes[base:], 5)})"
    )
    return replace(table.take(np.flatnonzero(~out)), notices=(*table.notices, note))
