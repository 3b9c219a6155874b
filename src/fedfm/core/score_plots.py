"""Plots of a task's scores in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Groups:
    """Rows in groups by their prediction: for each group the means of predictions and true values, with an interval.

    Attributes:
        name: the target.
        points: for each group (mean prediction, mean true value, least, greatest, number of rows); the interval of the
            true value is None for a single row.
        note: a sentence on how to read the plot.
    """

    name: str
    points: tuple[tuple[float, float, float | None, float | None, int], ...]
    note: str


@runtime_checkable
class HasPlots(Protocol):
    """A task whose scores are drawn."""

    def plots(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[Groups]:
        """The plots, from ``details`` of a run's result."""
