"""Partitions by flwr-datasets, Flower's package of partitioners. Each row must go to exactly one client.

The partitioners reproduce published splits of Flower projects. They add kinds of partitions that fedfm lacks: client
sizes that grow by a rule, Dirichlet shares within a client, groups of values, ranges of a number. The rows are shuffled
first, as in Flower.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np

from fedfm.data.spec import PartitionSpec
from fedfm.data.table import Table
from fedfm.errors import InputError, close, first_line, quote_names
from fedfm.seeds import derive, generator

_KEY = "data.partition"


def owners(
    table: Table, part: PartitionSpec, train: np.ndarray, label: str, clients: int, seed: int, notices: list[str]
) -> tuple[np.ndarray, int]:
    """Apply ``part.partitioner``; return (client index of each row of ``train`` (n,), number of clients).

    Args:
        label: the name by which the partitioner's arguments refer to the labels.
        clients: the value of ``num_partitions``, if the partitioner has this argument and the options do not set it.
        notices: receives the partitioner's warnings.

    Raises:
        InputError: there is no such partitioner, it refuses its arguments or the rows, or it does not assign each row
            to exactly one client.
    """
    name, options = part.partitioner or "", dict(part.options or {})
    kind = _find(name)
    takes = inspect.signature(kind).parameters
    if "num_partitions" in takes:
        options.setdefault("num_partitions", clients)
    elif part.clients is not None:
        raise InputError(
            f"{_KEY}.clients: {name} has no argument for the number of clients; its options are {quote_names(takes)}"
        )
    if "partition_by" in takes and table.labels is not None:
        options.setdefault("partition_by", label)
    if "seed" in takes:
        options.setdefault("seed", derive(seed, "partition", "flower") % 2**32)
    order = generator(seed, "partition", "flower", "rows").permutation(len(train))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("ignore")  # hides deprecations in libraries, which users cannot change
            warnings.simplefilter("always", UserWarning)
            partitioner = kind(**options)
            partitioner.dataset = _dataset(table, train[order], label)
            parts = [np.asarray(partitioner.load_partition(k)["row"]) for k in range(partitioner.num_partitions)]
    except Exception as error:  # partitioners raise many classes of errors
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise InputError(f"{_KEY}: {name}({given}) refuses: {type(error).__name__}: {first_line(error)}") from error
    notices += [f"{name}: {w.message}" for w in warned if w.category is UserWarning]
    times = np.bincount(np.concatenate(parts).astype(np.int64), minlength=len(train))
    if (times != 1).any():
        kept = ', as with name = "by_class"' if name == "PathologicalPartitioner" else ""
        raise InputError(
            f"{_KEY}.partitioner: {name} gives {int((times == 0).sum())} of {len(train)} training rows to no client "
            f"and {int((times > 1).sum())} to several; each row must belong to exactly one client{kept}"
        )
    owner = np.empty(len(train), dtype=np.int64)
    for k, places in enumerate(parts):
        owner[order[places.astype(np.int64)]] = k
    return owner, len(parts)


def _find(name: str) -> Any:
    try:
        from flwr_datasets import partitioner
    except ImportError:
        raise InputError(
            f'{_KEY}.name: "flower" needs flwr-datasets; install it with: pip install "fedfm[partitioners]"'
        ) from None
    known = [kind for kind in partitioner.__all__ if kind != "Partitioner"]
    if name not in known:
        raise InputError(
            f'{_KEY}.partitioner: flwr-datasets has no "{name}"; it has {quote_names(known)}{close(name, known)}'
        )
    return getattr(partitioner, name)


def _dataset(table: Table, rows: np.ndarray, label: str) -> Any:
    """The data set that a partitioner gets: each row's position, label and further columns."""
    from datasets import Dataset

    columns = {"row": np.arange(len(rows))} | {column: of[rows] for column, of in table.columns.items()}
    if table.labels is not None:
        columns[label] = table.labels[rows]
    return Dataset.from_dict(columns)
