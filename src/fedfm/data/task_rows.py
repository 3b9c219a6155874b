"""The part of a task that needs no model: read rows, and shuffle their targets for an attack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from fedfm.core.row_kinds import Reading
from fedfm.core.task_facts import TaskFacts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from fedfm.core.row_targets import RowTargets
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import FederatedData, Table


class RowTask(TaskFacts, Protocol):
    """The methods of a task that need no model; :class:`fedfm.tasks.task.Task` documents what they return."""

    def packs(self, kind: str) -> bool:
        """Whether the texts of rows of this kind are joined and cut into blocks."""

    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        """Whether these columns are rows of this task."""

    def sheet(self, text: str, source: str) -> Sheet:
        """The columns of a file whose name has one of the task's endings."""

    def folder(self, path: Path, spec: DataSpec, *, labelled: bool) -> Sheet | None:
        """The columns of a folder with the task's own layout; None for a folder with another layout."""

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading | None:
        """Read rows of this task from the columns."""

    def read_targets(self, sheet: Sheet, spec: DataSpec, *, source: str) -> RowTargets:
        """The targets of images, texts or feature vectors."""

    def keys_of_rows(self, data: FederatedData) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Keys of the [model] table that follow from the training rows of all clients, and notices."""

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """The same rows with their targets in random order."""


def row_task(task: TaskFacts) -> RowTask:
    """The same task as a :class:`RowTask`: every task is a :class:`fedfm.tasks.task.Task`, which has these methods."""
    return cast(RowTask, task)
