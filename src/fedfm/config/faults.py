"""Reports all faults of a file at once.

The reader of all tables stops at the first table with faults, and reports all faults of this table. So each table is
also read alone. If rules between tables refuse values, these values are removed, and the rest is read again. A fault of
this second reading counts only if the file has the fault's key; other faults may be consequences of the removal.
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
    """Read the tables of a file with ``read``, and report all faults together.

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
