"""Check that the columns of feature vectors, and the vectors of the clients, have values of similar size."""

from __future__ import annotations

import numpy as np

from fedfm.core.federation import MAX_NORM
from fedfm.data.table import FederatedData, Table
from fedfm.errors import InputError
from fedfm.runtime.partitioned import Partitioned

_AT_ONCE = 10**7  # values whose medians are computed at once
_UNITS = 100.0  # a notice is given if one client's usual value is at least this many times another client's
_WIDE = 1e4  # a notice names a column if its largest value exceeds 1e4, and 1e4 times that of the median column


def notices(population: Partitioned) -> list[str]:
    """Return notices about feature vectors if one column, or one client, has much larger values than the others."""
    table = population.federated.table
    if table.kind != "features" or not len(table.inputs):
        return []
    return [*_wide_column(table), *_other_units(population)]


def _wide_column(table: Table) -> list[str]:
    widths = _widths(table)
    usual = max(float(np.median(widths)), 1.0)
    wide = np.flatnonzero(widths > _WIDE * usual)
    if not len(wide):
        return []
    more = f" (one of {len(wide)} columns of that size)" if len(wide) > 1 else ""
    return [
        f"{table.source}: column x[:, {wide[0]}] has values up to {widths[wide[0]]:.3g}{more}, the median column up to "
        f"{usual:.3g}; the largest values alone determine the steps of training; use other units, or set data.scale"
    ]


def _other_units(population: Partitioned) -> list[str]:
    """Return a notice if the usual value of one client, or of the test rows, is many times that of another.

    The usual cause is that one of them measures in other units.
    """
    x, federated = population.federated.table.inputs, population.federated
    usual = dict(zip(federated.clients, _medians(x, federated).tolist(), strict=True))
    if len(federated.test):
        usual["the test rows"] = float(np.median(np.abs(x[federated.test])))
    usual = {name: size for name, size in usual.items() if size > 0}
    if len(usual) < 2:
        return []
    most, least = max(usual, key=usual.__getitem__), min(usual, key=usual.__getitem__)
    if usual[most] < _UNITS * usual[least]:
        return []
    return [
        f"the usual value of {most} is {usual[most]:.3g}, but that of {least} is {usual[least]:.3g}; if they have "
        "different units, give all vectors in the same units, or set data.scale"
    ]


def _medians(x: np.ndarray, federated: FederatedData) -> np.ndarray:
    """Return each client's median absolute value (K,), 0 without rows; clients of the same size are taken together."""
    joined, sizes = federated.all_rows("train"), federated.sizes("train")
    found, start = np.zeros(len(sizes)), np.cumsum(sizes) - sizes
    for n in np.unique(sizes[sizes > 0]):
        alike = np.flatnonzero(sizes == n)
        for some in np.array_split(alike, 1 + len(alike) * n * x.shape[1] // _AT_ONCE):
            rows = joined[start[some][:, None] + np.arange(n)]  # (clients, n)
            found[some] = np.median(np.abs(x[rows]).reshape(len(some), -1), axis=1)
    return found


def check_columns(table: Table) -> None:
    """Refuse values that are too large for training in single precision.

    Raises:
        InputError: there are such values; the error names their column.
    """
    widths = _widths(table)
    j = int(widths.argmax())
    if widths[j] > MAX_NORM:
        raise InputError(
            f"{table.source}: column x[:, {j}] has values up to {widths[j]:.3g}, more than training in single "
            f"precision allows ({MAX_NORM:g}); give the column in other units, leave it out, or set data.scale"
        )


def _widths(table: Table) -> np.ndarray:
    """Return the largest absolute value of each column (d,)."""
    x: np.ndarray = table.inputs
    widths: np.ndarray = np.maximum(x.max(0), -x.min(0)).astype(np.float64)
    return widths
