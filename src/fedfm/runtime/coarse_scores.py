"""Scores as a silo tells them: what a result is made of, and no finer than it needs.

A server chooses the model that is scored, so a loss with all its digits would carry numbers of single rows. An accuracy
is a number of right answers, which can be pooled over silos only if it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedfm.core import tasks

FIGURES = tasks.figures()  # of single tasks
_SUMS = tasks.sums_to_tell()  # told where the task has them
DIGITS, PLACES, MOST = 4, 4, 1e9  # significant digits of a figure, its last decimal place, its largest magnitude


def coarse(found: Mapping[str, Any]) -> dict[str, Any]:
    """Number of rows, accuracy, loss and the like: counts of the rows exact, all else to four significant digits.

    Example:
        >>> coarse({"n": 3, "accuracy": 2 / 3, "loss": 0.6931471805599453, "macro_f1": 0.5})
        {'n': 3, 'accuracy': 0.6666666666666666, 'loss': 0.6931}
    """
    told = {key: _round(found[key]) for key in ("accuracy", "loss", *FIGURES) if key in found}
    told |= {key: _round(found[key]) for key in _SUMS if found.get(key) is not None}
    if _counts(found.get("accuracy"), found.get("n")):
        told["accuracy"] = found["accuracy"]
    return ({"n": found["n"]} if "n" in found else {}) | told


def _round(value: Any) -> Any:
    """To :data:`DIGITS` significant digits, none behind the last of :data:`PLACES`, at most :data:`MOST`."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{min(max(value, -MOST), MOST):.{DIGITS - 1}e}"), PLACES)


def _counts(share: Any, n: Any) -> bool:
    """Whether a share of n rows is a whole number of them."""
    if not isinstance(share, (int, float)) or not isinstance(n, (int, float)) or not math.isfinite(share * n):
        return False
    return 0 <= share <= 1 and share == round(share * n) / max(n, 1)
