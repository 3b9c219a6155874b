"""Reports all faults of a file at once.

The reader of all tables reports the faults of one table together. Each table is also read alone, so that its faults do
not wait for those of another. What rules between tables refuse is removed, and the rest is read again. A fault of this
reading counts only if the file has its key, because the others follow from what was removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedfm.errors import InputError

T = TypeVar("T")


def read_all(
    path: str | Path,
    table: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], T],
    each: Iterable[Callable[[Mapping[str, Any]], object]] = (),
) -> T:
    """Read the tables of a file by ``read``, with all faults.

    Args:
        each: readers of single tables, which do not depend on each other.

    Raises:
        FaultyFile: all faults, one per line, with the file's name.
    """
    try:
        return read(table)
    except InputError as error:
        from fedfm.config.more_faults import all_of

        raise all_of(path, table, read, each, error) from None
