"""Columns that hold texts and are not read, which a user should know of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.data.pictures import Pictured
from fedfm.data.sources._files import listing
from fedfm.data.spec import DataSpec

_LOOK = 1000  # rows that are looked at
_WORDS = 3  # from which a value is a text and no name


def notice_of_unread(
    columns: Mapping[str, Sequence[Any]], used: set[str], spec: DataSpec, source: str, *, labelled: bool
) -> tuple[str, ...]:
    """A notice of the columns of texts, messages, lists and images that nothing reads.

    Args:
        labelled: whether the rows have classes; of rows without, a text that is alike in all of them is named, too,
            since it may be what every one of them was told.
    """
    chosen = {spec.partition.column, *(spec.where or ())}
    found = [n for n, values in columns.items() if n and n not in used | chosen and _tells(values, alike=not labelled)]
    if not found:
        return ()
    one = len(found) == 1
    return (f"column{'' if one else 's'} {listing(found, 6)} of {source} {'is' if one else 'are'} not read",)


def _tells(values: Sequence[Any], *, alike: bool) -> bool:
    """Whether a column holds what a model could be meant to read: images, lists, or mostly different texts."""
    if isinstance(values, Pictured):
        return True
    some = [v for v in values[:_LOOK] if v not in (None, "", [], {})]
    if any(isinstance(v, list | dict) for v in some):
        return True
    texts = [v for v in some if isinstance(v, str) and len(v.split()) >= _WORDS]
    return 2 * len(texts) > len(some) and (alike or 2 * len(set(texts)) > len(texts))
