"""Compare predicted with true numbers, by sums over the rows of each interval of predictions; sums can be added.

Predictions and targets are standardized. The intervals are a quarter of a standard deviation wide from -2.5 to 2.5,
and one more lies beyond each end. A silo does not send these sums: if an interval has one row, they give its target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fedfm.core.score_plots import Groups

NAME = "calibration"
_EDGES = np.linspace(-2.5, 2.5, 21)
_BINS = len(_EDGES) + 1
_SUMS = 4  # rows, predictions, true values, squares of true values
SUMS = _BINS * _SUMS  # number of sums for each target


def count(said: Tensor, targets: Tensor) -> list[float]:
    """The sums for each target and interval, from predictions and targets (n, T)."""
    e, z = said.numpy(), targets.numpy()
    found = np.zeros((z.shape[1], _BINS, _SUMS))
    for j in range(z.shape[1]):
        place = np.searchsorted(_EDGES, e[:, j], side="right")
        values = (np.ones(len(z)), e[:, j], z[:, j], z[:, j] ** 2)
        found[j] = np.stack([np.bincount(place, weights, _BINS) for weights in values], axis=1)
    flat: list[float] = found.ravel().tolist()
    return flat


def plots(
    figures: Mapping[str, Any], classes: Sequence[str], means: Sequence[float], scales: Sequence[float]
) -> list[Groups]:
    """One plot for each target, in the user's units; none if there are no scales, or if the sums are not known."""
    sums = figures.get(NAME)
    if not scales or not isinstance(sums, list) or len(sums) != len(classes) * SUMS or None in sums:
        return []
    found, by_target = [], np.array(sums, np.float64).reshape(len(classes), _BINS, _SUMS)
    units = zip(classes, by_target, means, scales, strict=True)
    for name, bins, mean, scale in units:
        points = tuple(_point(row, mean, scale) for row in bins.tolist() if row[0])
        note = (
            "On the global test rows, in groups by their prediction. Across: the mean prediction of a group. Up: the "
            "mean of its true values, with an interval of 95 % for this mean (Student's t); a single row has none. On "
            "the line the predictions are right on average."
        )
        found.append(Groups(name, points, note))
    return found


def _point(sums: Sequence[float], mean: float, scale: float) -> tuple[float, float, float | None, float | None, int]:
    n, said, true, squares = sums
    x, y = said / n, true / n
    low = high = None
    if n > 1:
        from scipy.special import stdtrit  # this part of scipy is quick to import

        half = float(stdtrit(n - 1, 0.975)) * math.sqrt(max(squares - n * y**2, 0.0) / (n - 1) / n)
        low, high = mean + scale * (y - half), mean + scale * (y + half)
    return mean + scale * x, mean + scale * y, low, high, int(n)
