"""Sums over rows, from which scores are computed; a sum may be unknown, or not finite.

A sum is a number, or a list of numbers: one for each class or target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Sums = Mapping[str, Any]


def mean(total: float, count: float) -> float | None:
    """The mean of ``count`` values whose sum is ``total``; None without values."""
    return total / count if count else None


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined; None if no value is defined."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def entries(value: Any) -> list[float]:
    """The entries of a sum that is a list; a single NaN for a sum that is not known."""
    return list(value) if isinstance(value, list | tuple) else [math.nan]


def add(parts: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """For each of the names, the sum over all parts; NaN if one of the parts does not have this sum."""
    some = [numbers(part, names) for part in parts]
    return {name: _sum([part[name] for part in some]) for name in names}


def _sum(values: Sequence[Any]) -> Any:
    """The sum of numbers, or of lists entry by entry; NaN for an unknown entry, or if the values differ in form."""
    if not any(isinstance(value, list) for value in values):
        return sum(values)
    sizes = {len(value) if isinstance(value, list) else -1 for value in values}
    if len(sizes) > 1:
        return math.nan
    return [math.nan if None in entries else sum(entries) for entries in zip(*values, strict=True)]


def numbers(sums: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The sums that ``names`` lists; NaN for a sum that is not known."""
    return {name: math.nan if sums.get(name) is None else sums[name] for name in names}


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name; None for a value or list entry that is unknown or not finite."""

    def json_value(value: Any) -> Any:
        if isinstance(value, list):
            return [json_value(entry) for entry in value]
        return value if value is None or math.isfinite(value) else None

    return {name: json_value(value) for name, value in values.items()}
