"""Targets of rows that do not have one class each, and tables of a task's scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RowTargets:
    """Targets of images, texts or feature vectors whose task is not to find one class.

    Attributes:
        values: float64 (N, T), the targets of each row.
        classes: names of the T targets.
        used: names of the columns that are read.
        notices: notices for the user on how the targets were read.
    """

    values: np.ndarray
    classes: tuple[str, ...]
    used: frozenset[str]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class FigureTable:
    """A table of scores in a report.

    Attributes:
        title: its heading.
        head: names of the columns.
        rows: the cells.
        note: a sentence on how to read it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
