"""95 % intervals of the mean of a score over seeds.

The interval is Student's t interval over the seeds, restricted to the values that the score can take.

The fraction of correct rows is uncertain even if all seeds agree, because the number of test rows is finite. So its
interval is at least as wide as Clopper and Pearson's interval (1934) for the test rows of all seeds together. This
interval is exact for independent rows. It is too narrow if all seeds have the same test rows, or if a class with few
rows counts as much as a large class (``balanced_accuracy``, ``macro_f1``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedfm.core.metric_names import LOCAL_ACCURACY, SHARES
from fedfm.runtime.predictions import personal
from fedfm.runtime.run_directory import Run

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; for more degrees the corrected normal
# quantile is used.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval by Student's t, which is NaN for one value."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan
    deviation = math.hypot(*(v - mean for v in values)) / math.sqrt(
        n - 1
    )  # hypot, since squares of large numbers overflow
    return mean, quantile(n) * deviation / math.sqrt(n)


def quantile(n: int) -> float:
    """Two-sided 95 % quantile of Student's t for ``n`` >= 2 values."""
    return _T95[n - 2] if n - 2 < len(_T95) else 1.96 + 2.4 / (n - 1)


def cut(values: Sequence[float], least: float = -math.inf, most: float = math.inf) -> tuple[float, float]:
    """95 % interval of the mean by Student's t, restricted to values that the score can take; NaN for one value.

    Args:
        least, most: bounds of the score. A bound is ignored if a value exceeds it.

    Example:
        >>> tuple(round(x, 3) for x in cut([90.0, 100.0], 0.0, 100.0))
        (31.47, 100.0)
    """
    mean, half = interval(values)
    low = max(mean - half, least) if min(values) >= least else mean - half
    high = min(mean + half, most) if max(values) <= most else mean + half
    return (low, high) if half == half else (math.nan, math.nan)


_LEAST = {"loss": 0.0, "perplexity": 1.0}  # smallest possible values of scores that are not fractions
FIGURES = (*SHARES, *_LEAST)


def bounds(key: str, values: Sequence[float], rows: int) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the mean of a score.

    It is (None, None) for one seed and for an infinite value. It is also (None, None) for equal values, unless the
    score is a fraction of a known number of rows.

    Args:
        rows: number of test rows of all seeds together; 0 if it is unknown.

    Example:
        >>> tuple(round(x, 3) for x in bounds("accuracy", [1.0, 1.0, 1.0], 54))
        (0.934, 1.0)
    """
    mean, half = interval(values)
    if not math.isfinite(half):
        return None, None
    if key in _LEAST:
        return cut(values, _LEAST[key]) if half else (None, None)  # a user's own loss may be negative
    low, high = mean - half, mean + half
    if rows:
        from fedfm.audits.inference.rates import clopper_pearson

        within = clopper_pearson(round(mean * rows), rows)
        low, high = min(low, within[0]), max(high, within[1])
    elif not half:
        return None, None
    return max(low, 0.0), min(high, 1.0)


def rows_behind(key: str, run: Run) -> int:
    """Number of test rows behind a score: the global ones, or those of the clients. 0 if the server does not know the
    number.
    """
    split = run.manifest["split"] or {}
    if key == LOCAL_ACCURACY or (key == "accuracy" and personal(run.experiment.method)):
        asked = (run.manifest["result"] or {}).get("client_accuracy") or {}
        if "sums" in split:
            return _rows(split["sums"]["test"]) if len(asked) == split["sums"]["clients"] else 0
        return sum(_rows(part.get("test")) for c, part in split.get("clients", {}).items() if c in asked or not asked)
    return _rows(split.get("test"))


def _rows(counts: Any) -> int:
    return int(counts["rows"]) if isinstance(counts, Mapping) and isinstance(counts.get("rows"), int) else 0
