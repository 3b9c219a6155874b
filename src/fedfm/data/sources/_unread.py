"""Notices about columns of texts and of splits that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.text import listing
from fedfm.data.pictures import Pictured
from fedfm.data.sources._splits import SPLIT_NAMES
from fedfm.data.spec import DataSpec

_LOOK = 1000  # rows that are examined
_SPLITS = 5  # most values of a column that marks splits
_SAYS = re.compile(r"(?:is[_ ]?)?(?:test|train|training|val|validation|holdout)(?:[_ ]?(?:set|row|split))?")
_WORDS = 3  # smallest number of words of a text; shorter values are names


def notice_of_unread(
    columns: Mapping[str, Sequence[Any]], used: set[str], spec: DataSpec, source: str, *, labelled: bool
) -> tuple[str, ...]:
    """A notice about columns of texts, messages, lists and images that nothing reads.

    Args:
        labelled: whether the rows have classes. If not, a column with the same text in all rows is named, too, since it
            may be a common system message.
    """
    chosen = {spec.partition.column, *(spec.where or ())}
    found = [n for n, values in columns.items() if n and n not in used | chosen and _tells(values, alike=not labelled)]
    if not found:
        return ()
    one = len(found) == 1
    return (f"column{'' if one else 's'} {listing(found, 6)} of {source} {'is' if one else 'are'} not read",)


def notice_of_splits(columns: Mapping[str, Sequence[Any]], spec: DataSpec, source: str) -> tuple[str, ...]:
    """A notice about a column that marks rows as train and test under another name than ``data.split``."""
    chosen = {spec.split, spec.label, spec.label_name, spec.partition.column, *(spec.where or ())}
    for name, values in columns.items():
        if spec.split in columns or name in chosen or not _marks_splits(name, values):
            continue
        return (
            f'column "{name}" of {source} seems to mark training and test rows, and is not read: other test rows are '
            f'drawn; if it does, name it "{spec.split}" or set data.split = "{name}"; the values are train, val and '
            "test",
        )
    return ()


def _marks_splits(name: str, values: Sequence[Any]) -> bool:
    """Whether all values name splits, a training split among them, or the column says which rows are test rows."""
    if isinstance(values, Pictured):
        return False
    found = {str(v).strip().lower() for v in values[:_LOOK]}
    if len(found) > _SPLITS or len(found) < 2:
        return False
    named = {SPLIT_NAMES.get(v) for v in found}
    yes_or_no = found <= {"0", "1", "true", "false"}
    return (None not in named and "train" in named) or (yes_or_no and _SAYS.fullmatch(name.strip().lower()) is not None)


def _tells(values: Sequence[Any], *, alike: bool) -> bool:
    """Whether a column may be meant as input: images, lists, or mostly different texts."""
    if isinstance(values, Pictured):
        return True
    some = [v for v in values[:_LOOK] if v not in (None, "", [], {})]
    if any(isinstance(v, list | dict) for v in some):
        return True
    texts = [v for v in some if isinstance(v, str) and len(v.split()) >= _WORDS]
    return 2 * len(texts) > len(some) and (alike or 2 * len(set(texts)) > len(texts))
