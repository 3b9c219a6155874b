"""Notices about columns of texts that nothing reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.text import listing
from fedfm.data.pictures import Pictured
from fedfm.data.spec import DataSpec

_LOOK = 1000  # rows that are examined
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


def _tells(values: Sequence[Any], *, alike: bool) -> bool:
    """Whether a column may be meant as input: images, lists, or mostly different texts."""
    if isinstance(values, Pictured):
        return True
    some = [v for v in values[:_LOOK] if v not in (None, "", [], {})]
    if any(isinstance(v, list | dict) for v in some):
        return True
    texts = [v for v in some if isinstance(v, str) and len(v.split()) >= _WORDS]
    return 2 * len(texts) > len(some) and (alike or 2 * len(set(texts)) > len(texts))
