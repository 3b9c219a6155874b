"""Widths of the columns of feature vectors."""

from __future__ import annotations

import numpy as np

from fedfm.core.federation import MAX_NORM
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.runtime.partitioned import Partitioned

_WIDE = 1e4  # a column of feature vectors this many times as wide as the median one, and at least so wide, is told


def notices(population: Partitioned) -> list[str]:
    """Lines about feature vectors of which one column is much wider than the others."""
    table = population.federated.table
    if table.kind != "features" or not len(table.inputs):
        return []
    widths = _widths(table)
    usual = max(float(np.median(widths)), 1.0)
    wide = np.flatnonzero(widths > _WIDE * usual)
    if not len(wide):
        return []
    more = f", and {len(wide) - 1} more columns as wide" if len(wide) > 1 else ""
    return [
        f"{table.source}: column x[:, {wide[0]}] has numbers up to {widths[wide[0]]:.3g}, the usual column up to "
        f"{usual:.3g}{more}: it alone decides the steps of training; give it in other units, or set data.scale"
    ]


def check_columns(table: Table) -> None:
    """Refuse numbers beyond what training in single precision takes.

    Raises:
        InputError: with the column.
    """
    widths = _widths(table)
    j = int(widths.argmax())
    if widths[j] > MAX_NORM:
        raise InputError(
            f"{table.source}: column x[:, {j}] has numbers up to {widths[j]:.3g}, beyond what training in single "
            f"precision takes ({MAX_NORM:g}): give it in other units, leave it out, or set data.scale"
        )


def _widths(table: Table) -> np.ndarray:
    """The largest absolute number of each column (d,)."""
    x: np.ndarray = table.inputs
    widths: np.ndarray = np.maximum(x.max(0), -x.min(0)).astype(np.float64)
    return widths
