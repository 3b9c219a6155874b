"""Notices about training rows that occur more than once: in one file, at several clients, or with several labels."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np

from fedfm.data.partition import CLIENT
from fedfm.data.repeats import comparable, has_files, numbers_of
from fedfm.data.table import Table

_FEW = 20  # with fewer rows there is no notice
_MANY = 0.1  # smallest share of repeated rows for a notice; fewer may repeat by chance
_SOME = 0.01  # smallest share of contradictory rows for a notice
_TWICE = 1.25  # smallest mean number of rows per value of a column that groups rows
_GROUPS = re.compile(
    r"(?:patient|subject|person|participant|speaker|proband|case|study|stud(?:ent|y)|animal|slide|document|doc|article"
    r"|video|session|customer|household|family|group)s?[_ -]?(?:id|nr|no|number|name|code|uid)?"
)
_FILES = 10_000  # largest number of image files that are read to find repetitions


def notices(table: Table) -> tuple[str, ...]:
    """Notices about training rows that repeat other training rows.

    Short texts recur by chance, so a few repetitions give no notice. If each client has its own file, there is also a
    notice about rows that two clients have in common.
    """
    rows = table.rows("train")
    if len(rows) < _FEW or not comparable(table):
        return ()
    if has_files(table) and len(rows) > _FILES:
        return ()
    number = np.unique(numbers_of(table, rows), return_inverse=True)[1]  # (n,): equal rows have equal numbers
    found = [_at_several_clients(table, rows, number) or _again(number), _contradictions(table, rows, number)]
    return tuple(text for text in found if text)


def _again(number: np.ndarray) -> str:
    again = len(number) - len(np.unique(number))
    if again < _MANY * len(number):
        return ""
    return f"{again} of {len(number)} training rows repeat another training row: were files joined twice?"


def _at_several_clients(table: Table, rows: np.ndarray, number: np.ndarray) -> str:
    """A notice about the two clients that have the largest share of training rows in common."""
    if CLIENT not in table.columns:
        return ""
    names = table.columns[CLIENT][rows]
    held = {name: set(number[names == name].tolist()) for name in np.unique(names).tolist()}
    owners: dict[int, list[str]] = {}
    for name, numbers in held.items():
        for n in numbers:
            owners.setdefault(n, []).append(name)
    common: Counter[tuple[str, str]] = Counter()
    for of in owners.values():  # counts only pairs of clients that are adjacent by name, to keep the work linear
        common.update(pairwise(of))
    shares = {pair: n / min(len(held[pair[0]]), len(held[pair[1]])) for pair, n in common.items()}
    many = sorted((pair for pair, share in shares.items() if share >= _MANY), key=lambda pair: (-shares[pair], pair))
    if not many:
        return ""
    first = many[0]
    more = f", as do other pairs of clients ({len(many) - 1})" if len(many) > 1 else ""
    return (
        f"{first[0]} and {first[1]} have {common[first]} training rows in common{more}: is one file given twice, or "
        "one patient or customer at several clients?"
    )


def shared_groups(table: Table, chosen: str | None) -> str | None:
    """A notice about a column of people or documents if test rows and training rows have values of it in common.

    Args:
        chosen: the column by which rows are assigned to clients.
    """
    train, test = table.rows("train"), table.rows("test")
    if len(test) < _FEW // 2:
        return None
    for name, values in table.columns.items():
        if name in (chosen, CLIENT) or not _GROUPS.fullmatch(name.strip().lower()):
            continue
        known = set(values[train].tolist()) - {""}
        count = int(np.isin(values[test], sorted(known)).sum())
        if count >= _MANY * len(test) and _TWICE * len(set(values.tolist())) <= len(values):
            return (
                f'{count} of {len(test)} test rows of {table.source} have a value of column "{name}" that training '
                "rows have, too: test rows were drawn without regard to it, and rows of one person or document are "
                'alike, so a result may be too good; a column "split" can assign such rows to one split'
            )
    return None


def _contradictions(table: Table, rows: np.ndarray, number: np.ndarray) -> str:
    """A notice about training rows that are equal but have different labels."""
    if table.labels is None:
        return ""
    labels = table.labels[rows]
    pairs = np.unique(np.stack([number, labels]), axis=1)[0]  # (p,): the number in each distinct pair (number, label)
    several = np.unique(pairs[:-1][pairs[1:] == pairs[:-1]])
    count = int(np.isin(number, several).sum())
    if not count or count < _SOME * len(rows):
        return ""
    return f"{count} of {len(rows)} training rows have an equal row with another label: no model learns both"
