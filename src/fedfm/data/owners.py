"""Functions that several partitions use to assign rows to clients."""

from __future__ import annotations

import numpy as np

from fedfm.data.stratify import quota
from fedfm.data.table import Table
from fedfm.seeds import generator

Owner = np.ndarray  # (n,) int64: the client of each of n rows
Splits = tuple[np.ndarray, np.ndarray, np.ndarray]  # row indexes: train, val, test


def own_test(
    table: Table, test: np.ndarray, train: np.ndarray, owner: Owner, clients: int, seed: int, part: str = ""
) -> Owner:
    """The client of each row in ``test`` (n,); -1 for rows of a class on which no client trains.

    The test rows of each class are divided in proportion to the clients' training rows of that class, by largest
    remainder. A generator derived from the seed breaks ties and draws the rows.
    """
    labels = np.zeros(len(table), dtype=np.int64) if table.labels is None else table.labels
    result = np.full(len(test), -1, dtype=np.int64)
    for c in np.unique(labels[test]):
        rng = generator(seed, "partition", "test", part, int(c))
        counts = np.bincount(owner[labels[train] == c], minlength=clients)
        places = rng.permutation(np.flatnonzero(labels[test] == c))
        if counts.any():
            result[places] = np.repeat(np.arange(clients), quota(counts, len(places), rng))
    return result


def by_owner(rows: np.ndarray, owner: Owner, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows in order of clients (n,), ascending for each client, and the place (K + 1,) where each client's begin.

    Rows of owner -1 are left out.

    Example:
        >>> [part.tolist() for part in by_owner(np.array([3, 5, 7, 9]), np.array([1, 0, -1, 1]), 2)]
        [[5, 3, 9], [0, 1, 3]]
    """
    order = np.lexsort((rows, owner))
    start = np.searchsorted(owner[order], np.arange(clients + 1))
    return rows[order[start[0] :]], start - start[0]


def deal_evenly(rows: np.ndarray, clients: int, rng: np.random.Generator) -> Owner:
    """Assign rows to clients at random; the clients' numbers of rows differ by at most one."""
    owner = np.empty(len(rows), dtype=np.int64)
    owner[rng.permutation(len(rows))] = np.arange(len(rows)) % clients
    return owner


def number_names(stem: str, count: int, digits: int = 1) -> list[str]:
    """Names such as ``client-00`` ... ``client-11``, padded so that they sort by number."""
    width = max(digits, len(str(count - 1)))
    return [f"{stem}-{k:0{width}d}" for k in range(count)]
