"""Files of rows for the tests of tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fedfm.data.load import load_table
from fedfm.data.spec import DataSpec
from fedfm.data.table import Table
from small import jsonl as jsonl


def load(task: str, path: Path, **keys: Any) -> Table:
    """Read a file as rows of a task; ``keys`` are those of [data]."""
    return load_table(DataSpec(path=str(path), **keys), seed=0, task=task)


def loader(task: str) -> partial[Table]:
    """:func:`load` for one task."""
    return partial(load, task)
