"""Targets of rows as a tensor, in the order of the model's classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfm.data.table import Table
from fedfm.errors import InputError

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts


def targets_of(
    targets: np.ndarray,
    table: Table,
    classes: tuple[str, ...],
    task: TaskFacts | None,
    index: np.ndarray | None = None,
) -> dict[str, Tensor]:
    """The tensor ``targets``, float64 (n, T), of the rows ``index`` (by default all).

    If the rows lack a target, its value is the task's ``absent_target``.

    Args:
        targets: all targets of the table (N, U); the table's ``classes`` name them.

    Raises:
        InputError: a target is not in ``classes``, or the rows lack one that the task needs.
    """
    source, place = table.source or "the data", {name: i for i, name in enumerate(table.classes)}
    if unknown := [name for name in place if name not in classes]:
        raise InputError(f"{source}: target {unknown[0]!r} is none of the model's: {', '.join(classes)}")
    values = targets if index is None else targets[index]
    found = np.full((len(values), len(classes)), np.nan)
    there = [j for j, name in enumerate(classes) if name in place]
    found[:, there] = values[:, [place[classes[j]] for j in there]]
    absent = task.absent_target if task is not None else None
    if absent is not None:
        found = np.nan_to_num(found, nan=absent)
    elif np.isnan(found).any():
        name = classes[int(np.flatnonzero(np.isnan(found).any(0))[0])]
        raise InputError(f"{source}: rows have no target {name!r}, which the model has")
    return {"targets": torch.from_numpy(found)}
