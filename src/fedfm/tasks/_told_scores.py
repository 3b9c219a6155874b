"""Check that scores and sums that a client sent can be those of some rows, before they are added to those of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedfm.core.metric_names import ACCURACY, BALANCED_ACCURACY, MACRO_F1
from fedfm.errors import E_FIELD, ClientFault

if TYPE_CHECKING:
    from fedfm.tasks.task import Task

_MOST = 10**9  # rows of a client
_SLACK = 1e-3  # a rounded share may exceed 1 by as much


def check(task: Task, told: Mapping[str, Any], classes: Sequence[str]) -> None:
    """See :meth:`fedfm.tasks.task.Task.check_told`; a value that is absent or None is not checked."""
    if not 0 <= told.get("n", 0) <= _MOST:
        raise ClientFault(E_FIELD, f"n is {told['n']:g}: expected a number of rows")
    for name, size in task.list_sizes(classes).items():
        found = told.get(name)
        if found is not None and len(found) != size:
            raise ClientFault(E_FIELD, f"{name} has {len(found)} entries: expected {size}")
    signed = task.row_means.values()  # their means may have any sign
    for name in (name for name in task.sums if name not in signed):
        found = told.get(name)
        if isinstance(found, int | float) and found < 0:
            raise ClientFault(E_FIELD, f"{name} is {found:g}: expected a sum that is not negative")
    sums = {name: told.get(name) for name in task.sums}
    known = sums if any(value is not None for value in sums.values()) else {}
    for figures in (told, task.figures_of(known) if known else {}):
        for name in (ACCURACY, BALANCED_ACCURACY, MACRO_F1, *task.drawn):
            share = figures.get(name)
            if share is not None and not 0 <= share <= 1 + _SLACK:
                raise ClientFault(E_FIELD, f"{name} is {share:g}: expected a number from 0 to 1")
