"""Sums over rows, from which scores are computed; a sum may be unknown, or not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Sums = Mapping[str, float | None]


def mean(total: float, count: float) -> float | None:
    """The mean of ``count`` values with this sum; None without values."""
    return total / count if count else None


def add(parts: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """The sums of these names over all parts; NaN for a sum that one of the parts does not have."""
    some = [numbers(part, names) for part in parts]
    return {name: sum(part[name] for part in some) for name in names}


def numbers(sums: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    """The sums of these names; NaN for a sum that is not known."""
    return {name: math.nan if sums.get(name) is None else sums[name] for name in names}


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name; None for a value that is not known or not finite."""
    return {name: value if value is None or math.isfinite(value) else None for name, value in values.items()}
