"""All faults of a file at once.

A reader of tables tells the faults of one table together. Beside it each table is read alone, so that none waits for
another. What rules between tables refuse is taken out, and the rest is read again: there a fault counts only if the
file has its key, because what follows from something that was taken out is no fault of the file.
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
    """What ``read`` makes of the tables of a file.

    Args:
        each: readers of single tables, none of which needs what another one refuses.

    Raises:
        FaultyFile: all faults, a line each, with the file's name.
    """
    try:
        return read(table)
    except InputError as error:
        from fedfm.config.more_faults import all_of

        raise all_of(path, table, read, each, error) from None
