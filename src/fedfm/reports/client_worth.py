"""The section about what each client contributed, by ``fedfm worth``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedfm.reports.page import note, table
from fedfm.reports.read import RunFiles, mapping, numeric
from fedfm.reports.text import esc


def section(run: RunFiles) -> str:
    """A table with what each client contributed."""
    found = mapping(run.manifest.get("worth"))
    alone = mapping(found.get("leave_one_out"))
    rows = [
        [name, interval(mapping(about), "value"), f"{numeric(mapping(alone.get(name)).get('value')) or 0.0:.4f}"]
        for name, about in mapping(found.get("shapley")).items()
    ]
    total = numeric(found.get("total")) or 0.0
    text = (
        f"Shapley values: a client's mean gain in {found.get('measure')} on the global test rows, over all orders in "
        "which clients could join. Brackets: 95 % intervals over test rows and drawn orders; a figure without them is "
        f"one of all rows. The values add up to {total:.4f}."
    )
    text += _of_own_sums(found)
    return note(esc(text)) + table(["client", "Shapley value", "leave one out"], rows, "What each client contributed")


def summary(run: RunFiles) -> list[str]:
    """A sentence for the dossier; none if nobody computed the values."""
    found = mapping(run.manifest.get("worth"))
    values = [f"{name} {interval(mapping(about), 'value')}" for name, about in mapping(found.get("shapley")).items()]
    what = f"What each client contributed ({found.get('measure')}, Shapley values)"
    return [f"{what}: {', '.join(values)}.{_of_own_sums(found)}"] if values else []


def _of_own_sums(found: Mapping[str, Any]) -> str:
    """A sentence on the clients that disclosed their own sums, with a space before it; "" if none did."""
    names = ", ".join(map(str, mapping(found.get("opened"))))
    return f" To be valued, {names} gave their own sums, which the run hid or did not keep." if names else ""


def interval(found: Mapping[str, Any], key: str) -> str:
    """A figure and its interval, e.g. ``0.21 [0.18, 0.23]``; without an interval the figure; "" if it is unknown."""
    figures = [numeric(found.get(name)) for name in (key, "low", "high")]
    if None in figures:
        return "" if figures[0] is None else f"{figures[0]:.4f}"
    middle, low, high = (f"{x:.4f}" for x in figures if x is not None)
    return f"{middle} [{low}, {high}]"
