"""Notices of rows that are probably not what was meant: classes that are none, and test rows that are trained on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.data.sources._files import listing
from fedfm.data.table import Table

_LONG_NAME = 200  # characters; a class name that is longer is rather a text
_MANY = 20  # classes from which numbers look like a quantity, and rows from which labels should recur
_PROBED = 256  # numbers of an array
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
        _trained_on(table),
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


def _trained_on(table: Table) -> str | None:
    """Test rows whose inputs are those of a training row, too."""
    train, test = table.rows("train"), table.rows("test")
    if table.kind in ("own", "passages") or not len(train) or not len(test):
        return None
    likely = _common(np.fromiter(map(_probe(table), table.inputs), np.int64, len(table)), train, test)
    if not len(likely):
        return None
    whole = np.array([_whole(table, table.inputs[int(i)]) for i in likely], dtype=np.int64)
    tested = np.isin(likely, test)
    count = int(np.isin(whole[tested], whole[~tested]).sum())
    if not count:
        return None
    return f"{count} of {len(test)} test rows are also training rows: on them a result says what was learned by heart"


def _common(keys: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The rows (n,) of either part whose key is in both parts."""
    both = np.intersect1d(keys[train], keys[test])
    rows = np.concatenate([train, test])
    found: np.ndarray = rows[np.isin(keys[rows], both)]
    return found


def _probe(table: Table) -> Callable[[Any], int]:
    """A number of an input that equal inputs share: of a file the size, of an array the beginning."""
    if table.kind == "image" and not isinstance(table.inputs, np.ndarray):
        return lambda item: hash(item) if isinstance(item, bytes) else os.path.getsize(item)
    if isinstance(table.inputs, np.ndarray):
        return lambda row: hash(row.reshape(-1)[:_PROBED].tobytes())
    return hash


def _whole(table: Table, item: Any) -> int:
    """A number of an input that no other input has, but for one in 2^64."""
    if isinstance(item, np.ndarray):
        return hash(item.tobytes())
    return hash(Path(item).read_bytes() if table.kind == "image" and not isinstance(item, bytes) else item)
