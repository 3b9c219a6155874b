"""Partition by a column: the rows of each value go to one client, or are shared by several clients."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from fedfm.core import tasks
from fedfm.core.text import listing
from fedfm.data.owners import Owner, Splits, by_owner, deal_evenly, number_names, own_test
from fedfm.data.sources._files import column as named_column
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.seeds import generator


def key_that_reads(column: str, spec: DataSpec) -> str | None:
    """The key of the [data] table that uses the column as input, as label or as split."""
    of_tasks = (key for key, of in tasks.columns().items() if not of.several)
    keys = ("label", "label_name", "split", "text", "image", *of_tasks)
    return next((key for key in keys if spec.column(key) == column), None)


def by_column(
    table: Table, column: str, part: PartitionSpec, splits: Splits, seed: int, notices: list[str]
) -> tuple[list[str], list[Owner]]:
    """Return (the clients' names, made from the column's values; for each split, the owners of its rows)."""
    key = "data.partition"
    of = named_column(table.columns, column, f"{key}.column", table.source)
    train, val, test = splits
    values = sorted(set(of[train].tolist()))
    if "" in values:
        raise InputError(
            f'{key}.column: {int((of[train] == "").sum())} training rows have no value in column "{column}"',
            key=f"{key}.column",
        )
    for name, rows in (("val", val), ("test", test)):
        strange = sorted(set(of[rows].tolist()) - set(values))
        if strange:
            lost = int(np.isin(of[rows], strange).sum())
            use = "are not used" if name == "val" else "are only in the global test"
            notices.append(
                f"{lost} {name} rows are of {column} {listing(strange, 5)}, which has no training rows: they {use}"
            )
    stems = [
        re.sub(r"[^\w.-]+", "_", value.strip()).lstrip(".") or "_" for value in values
    ]  # a client's name also names its folder
    count = Counter(stems)
    for stem, value in zip(stems, values, strict=True):
        if count[stem] > 1:
            raise InputError(
                f'{key}.column: "{value}" and another value of "{column}" both give the client name "{stem}"',
                key=f"{key}.column",
            )
    total = len(values) if part.clients is None else part.clients
    if total % len(values):
        raise InputError(
            f'{key}.clients: {total} is not a multiple of the {len(values)} values of "{column}" '
            f"({listing(values, 6)}): each value's rows must go to the same number of clients",
            key=f"{key}.clients",
        )
    each = total // len(values)
    names: list[str] = []
    owners = [np.full(len(rows), -1, dtype=np.int64) for rows in splits]
    held = [_places(of[rows], values) for rows in splits]
    for k, (value, stem) in enumerate(zip(values, stems, strict=True)):
        places = [part[k] for part in held]
        if each > len(places[0]):
            raise InputError(
                f'{key}.clients: "{value}" has {len(places[0])} training rows for {each} clients', key=f"{key}.clients"
            )
        mine = [
            deal_evenly(place, each, generator(seed, "partition", "by_column", s, value))
            for s, place in zip(("train", "val"), places[:2], strict=True)
        ]
        mine.append(own_test(table, test[places[2]], train[places[0]], mine[0], each, seed, value))
        # No client of this value trains on the class of these rows, but one of these clients has to own each row.
        orphans = np.flatnonzero(mine[2] < 0)
        mine[2][orphans] = np.arange(len(orphans)) % each
        for owner, place, local in zip(owners, places, mine, strict=True):
            owner[place] = len(names) + local
        names += [stem] if each == 1 else number_names(stem, each)
    return names, owners


def _places(column: np.ndarray, values: list[str]) -> list[np.ndarray]:
    """For each of the sorted values the ascending places where the column has it."""
    found = np.searchsorted(values, column)
    owner = np.where(np.array([*values, ""])[found] == column, found, -1)
    places, start = by_owner(np.arange(len(column)), owner, len(values))
    return np.split(places, start[1:-1])
