"""Notices of rows that are probably not what was meant: classes that are none, and test rows that are trained on."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fedfm.data.repeats import of_training_rows
from fedfm.data.sources._files import listing
from fedfm.data.table import Table

_LONG_NAME = 200  # characters; a class name that is longer is rather a text
_MANY = 20  # classes from which numbers look like a quantity, and rows from which labels should recur
_MARKS = (";", "|", ",", "/", "+", "&")  # between several labels in one
_WAY = "fedfm.federate with a module of your own (docs: how-to/own-model.md)"


def doubts(table: Table, label: str) -> tuple[str, ...]:
    """All notices of this kind.

    Args:
        label: name of the column of labels.
    """
    found = (
        _texts_as_classes(table, label),
        _quantities(table, label),
        _several(table, label),
        _unique(table, label),
        of_training_rows(table),
    )
    return tuple(text for text in found if text)


def _texts_as_classes(table: Table, label: str) -> str | None:
    longest = max(map(len, table.classes), default=0)
    if longest <= _LONG_NAME:
        return None
    return f'a class name has {longest} characters: is data.label = "{label}" the column of the labels?'


def _quantities(table: Table, label: str) -> str | None:
    """Numbers with an order and gaps or fractions: 20..79, but neither 0..9 nor 1..1000, which number classes."""
    try:
        numbers = sorted(map(float, table.classes))
    except ValueError:
        return None
    if not numbers or not np.isfinite(numbers).all():
        return None
    whole = all(n.is_integer() for n in numbers)
    counted = whole and numbers[0] in (0, 1) and numbers[-1] - numbers[0] == len(numbers) - 1
    if counted or len(numbers) < (_MANY if whole else 3):
        return None
    return (
        f'column "{label}" holds {len(numbers)} different numbers from {numbers[0]:g} to {numbers[-1]:g}, each taken '
        f"as a class: if they are a quantity, regression predicts it, with {_WAY}"
    )


def _several(table: Table, label: str) -> str | None:
    """Classes that others make up: "heart;lung" beside "heart" and "lung"."""
    for mark in _MARKS:
        parts = {name: [p.strip(" []'\"") for p in name.split(mark)] for name in table.classes}
        count = Counter(part for some in parts.values() for part in set(some))
        made = [n for n, some in parts.items() if len(set(some)) > 1 and all(p and count[p] > 1 for p in some)]
        if made:
            return (
                f"{len(made)} of {len(table.classes)} classes seem to be several labels in one, as "
                f"{listing(made[:2])}: each is taken as a class of its own; several labels a row take {_WAY}"
            )
    return None


def _unique(table: Table, label: str) -> str | None:
    if table.labels is None or len(table) < _MANY:
        return None
    there = len(np.unique(table.labels))
    if 2 * there <= len(table):
        return None
    return f'column "{label}" has {there} different labels in {len(table)} rows: is it the column of the classes?'
