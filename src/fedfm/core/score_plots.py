"""Plots of a task's scores in a report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Groups:
    """Groups of rows with similar predictions, and the mean prediction and mean true value of each group.

    Attributes:
        name: name of the target.
        points: for each group (mean prediction, mean true value, least, greatest, number of rows). The interval [least,
            greatest] is that of the mean true value; both are None for a single row.
        note: text on how to read the plot.
    """

    name: str
    points: tuple[tuple[float, float, float | None, float | None, int], ...]
    note: str
