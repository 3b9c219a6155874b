"""Round the scores that a silo reports, so that they have no more digits than a result needs.

The server chooses the model that is scored. From a loss with all its digits the server could compute values of single
rows. An accuracy stays exact: it is a count of right answers, and only exact counts can be added over silos.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedfm.core import tasks

if TYPE_CHECKING:
    from fedfm.core.task_facts import TaskFacts

DIGITS, PLACES, MOST = 4, 4, 1e9  # of a score: significant digits, largest number of decimal places, largest magnitude


def coarse(found: Mapping[str, Any], task: TaskFacts) -> dict[str, Any]:
    """Round all scores to four significant digits, except numbers of rows and fractions of rows, which stay exact.

    Scores and sums that the task does not have are left out. The task decides how much detail its lists keep. If the
    rows are too few for sums, only their number is left.

    Example:
        >>> coarse({"n": 3, "accuracy": 2 / 3, "loss": 0.6931471805599453, "macro_f1": 0.5}, tasks.default())
        {'n': 3, 'accuracy': 0.6666666666666666, 'loss': 0.6931}
    """
    if too_few(found.get("n"), task):
        return {"n": found["n"]}
    coarse = {key: _round(found[key]) for key in ("accuracy", "loss", *task.figures) if key in found}
    coarse |= {key: _round(found[key]) for key in tasks.sums_to_tell(task) if found.get(key) is not None}
    if _counts(found.get("accuracy"), found.get("n")):
        coarse["accuracy"] = found["accuracy"]
    coarse = ({"n": found["n"]} if "n" in found else {}) | coarse
    return {**task.coarsen(coarse)}


def too_few(rows: Any, task: TaskFacts) -> str:
    """Why a silo reports no scores on so few rows; empty if it reports them, or if there are no rows."""
    if not rows or rows >= task.least_rows:
        return ""
    return (
        f'scores on fewer than {task.least_rows} rows do not leave a silo: the sums of task "{task.name}" would '
        "disclose their targets"
    )


def _round(value: Any) -> Any:
    """Round to :data:`DIGITS` significant digits and :data:`PLACES` decimal places, and limit to :data:`MOST`."""
    if isinstance(value, list):
        return [_round(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _round(entry) for name, entry in value.items()}
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return round(float(f"{min(max(value, -MOST), MOST):.{DIGITS - 1}e}"), PLACES)


def _counts(share: Any, n: Any) -> bool:
    """Whether ``share`` times n is a whole number of rows."""
    if not isinstance(share, (int, float)) or not isinstance(n, (int, float)) or not math.isfinite(share * n):
        return False
    return 0 <= share <= 1 and share == round(share * n) / max(n, 1)
