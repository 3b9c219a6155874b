"""Partitions: assign each training row to exactly one client, and choose test rows for each client's own model.

iid        random rows; sizes differ by at most one.
dirichlet  for each class, shares over the K clients from Dir(alpha 1_K) (Hsu et al. 2019), rounded to whole rows by
           largest remainder; the rows are random. Sizes are not balanced, and empty clients are not redrawn.
by_class   each client has m = ``classes_per_client`` of C classes. Each class is shared evenly by K m / C clients,
           rounded up or down.
by_column  one client for each value of the column. With ``clients = N`` and V values, each value's rows are shared
           evenly by N / V clients.
flower     any partitioner of flwr-datasets that assigns each row to one client (see
           :mod:`fedfm.data.flower_partitions`).

Rows that the source marks as validation rows follow the same rule, with the same shares and clients. With ``flower``,
the validation rows of each class are divided in proportion to the clients' training rows of that class.
"""

# flwr-datasets also has partitioners for the first four rules (its Dirichlet partitioner has the same distribution if
# self_balancing is off). But its import takes 2 s. A partitioner divides one list of rows, so validation rows would get
# other shares and clients. No partitioner splits the rows of one value between several clients.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedfm.core.text import listing
from fedfm.data.owners import Owner, Splits, by_owner, deal_evenly, number_names, own_test
from fedfm.data.spec import DataSpec, PartitionSpec
from fedfm.data.stratify import apportion, hold_out
from fedfm.data.table import ClientRows, DealtRows, FederatedData, Table
from fedfm.errors import InputError
from fedfm.seeds import generator

DEFAULT_CLIENTS = 10
CLIENT = "client"  # the column with the client's name if each client has its own file


def deal(table: Table, spec: DataSpec, *, seed: int) -> FederatedData:
    """Partition the table between clients; the result depends on the seed.

    ``val_fraction`` of a client's training rows become validation rows, stratified by class. With ``by_column`` or
    ``clients``, a client's own test rows are the test rows of its value or file. Otherwise the test rows of each class
    are divided in proportion to the clients' training rows of that class (``own_test``). Clients without training rows
    are dropped with a notice.

    Raises:
        InputError: a key of the partition is wrong, or there are more clients than rows.

    Example:
        >>> from fedfm.data.load import load_table
        >>> from fedfm.data.spec import DataSpec, PartitionSpec
        >>> spec = DataSpec(name="digits", partition=PartitionSpec("iid", clients=3))
        >>> data = deal(load_table(spec, seed=0), spec, seed=0)
        >>> {name: len(rows.train) for name, rows in data.clients.items()}
        {'client-00': 480, 'client-01': 479, 'client-02': 479}
    """
    train, val, test = table.rows("train"), table.rows("val"), table.rows("test")
    if spec.classes is not None:  # a server without rows: only the silos have rows
        return FederatedData(table, {}, test)
    if not len(train):
        raise InputError(f"{table.source} has no training rows")
    part = spec.partition
    notices: list[str] = []
    if spec.clients is not None or part.name == "by_column":
        column = CLIENT if spec.clients is not None else part.column or ""
        from fedfm.data.partition_columns import by_column, key_that_reads

        if column not in table.columns and (key := key_that_reads(column, spec)):
            by_class = 'to deal classes, set name = "by_class" and classes_per_client'
            way = by_class if key == "label" and table.targets is None else "name another column"
            raise InputError(
                f'data.partition.column: column "{column}" is read as data.{key}, and cannot name clients: {way}',
                key="data.partition.column",
            )
        names, owners = by_column(table, column, part, (train, val, test), seed, notices)
    else:
        names, owners = _by_rule(table, spec, (train, val, test), seed, notices)
        if orphans := int((owners[2] < 0).sum()):
            notices.append(
                f"{orphans} test rows are of classes that no client trains on: they are only in the global test"
            )
    everybody, counts = names, [np.bincount(owner[owner >= 0], minlength=len(names)) for owner in owners]
    empty = np.flatnonzero(counts[0] == 0)
    for k in empty[counts[1][empty] > 0]:
        notices.append(f"{names[k]} has no training rows: its {counts[1][k]} validation rows are not used")
    if len(empty):
        notices.append(
            f"the partition left {len(empty)} of {len(names)} clients without training rows; they are left out: "
            f"{listing(names[k] for k in empty)}"
        )
        place = np.append(np.where(counts[0] > 0, np.cumsum(counts[0] > 0) - 1, -1), -1)  # the last is of owner -1
        owners, names = [place[owner] for owner in owners], [names[k] for k in np.flatnonzero(counts[0])]
    if spec.val_fraction > 0:
        (train, val), owners[:2] = _hold_out(table, (train, val), owners, names, spec.val_fraction, seed)
    parts = [by_owner(rows, owner, len(names)) for rows, owner in zip((train, val, test), owners, strict=True)]
    clients: Mapping[str, ClientRows] = DealtRows(names, parts)
    if spec.without:
        from fedfm.data.departed import leave_out

        clients, test = leave_out(clients, everybody, test, spec)
    return FederatedData(table, clients, test, (*table.notices, *notices))


def _hold_out(
    table: Table, rows: tuple[np.ndarray, np.ndarray], owners: list[Owner], names: list[str], fraction: float, seed: int
) -> tuple[list[np.ndarray], list[Owner]]:
    """Make a share of each client's training rows validation rows; return (rows, owners) of both splits."""
    joined, start = by_owner(rows[0], owners[0], len(names))
    held = []
    for k, name in enumerate(names):
        mine = joined[start[k] : start[k + 1]]
        labels = None if table.labels is None else table.labels[mine]
        held.append(hold_out(labels, mine, fraction, generator(seed, "val", name)))
    chosen = np.concatenate(held)
    kept, of = ~np.isin(rows[0], chosen), np.repeat(np.arange(len(names)), list(map(len, held)))
    moved = [np.concatenate([rows[1], chosen]), np.concatenate([owners[1], of])]
    return [rows[0][kept], moved[0]], [owners[0][kept], moved[1]]


def summary(data: FederatedData) -> dict[str, Any]:
    """Counts of rows per client, split and class as JSON values.

    Returns:
        ``kind``, ``source``, ``classes``; ``test``: the global test rows; ``clients``: name -> ``train``, ``val``,
        ``test``. Each count is ``{"rows": n, "by_class": [n_1 ... n_C]}``; ``by_class`` is None without labels.
    """
    labels, classes = data.table.labels, data.table.classes

    def count(rows: np.ndarray) -> dict[str, Any]:
        by = None if labels is None else np.bincount(labels[rows], minlength=len(classes)).tolist()
        return {"rows": len(rows), "by_class": by}

    return {
        "kind": data.table.kind,
        "source": data.table.source,
        "classes": list(classes),
        "test": count(data.test),
        "clients": {
            name: {"train": count(rows.train), "val": count(rows.val), "test": count(rows.test)}
            for name, rows in data.clients.items()
        },
    }


def _by_rule(
    table: Table, spec: DataSpec, splits: Splits, seed: int, notices: list[str]
) -> tuple[list[str], list[Owner]]:
    """Return (names of the K clients; for each split, the owners of its rows)."""
    part = spec.partition
    train, val, test = splits
    clients = DEFAULT_CLIENTS if part.clients is None else part.clients
    if clients > len(train):
        raise InputError(
            f"data.partition.clients = {clients}: there are {len(train)} training rows, and at most one client per row",
            key="data.partition.clients",
        )
    labels, named = table.labels, (("train", train), ("val", val))
    if part.name == "flower":
        from fedfm.data import flower_partitions

        owner, clients = flower_partitions.owners(table, part, train, spec.label, clients, seed, notices)
        kept = own_test(table, val, train, owner, clients, seed, "val")
        lost = np.flatnonzero(kept < 0)  # rows of classes on which no client trains
        kept[lost] = np.arange(len(lost)) % clients
        owners = [owner, kept]
    elif part.name == "iid":
        owners = [deal_evenly(rows, clients, generator(seed, "partition", "iid", s)) for s, rows in named]
    elif labels is None:
        raise InputError(
            f'data.partition.name: "{part.name}" needs {"labels" if table.targets is None else "one class a row"}, and '
            f'{table.source} has none: use "iid" or "by_column"',
            key="data.partition.name",
        )
    else:
        known = np.unique(labels[np.concatenate([train, val])])
        by_class = part.name == "by_class"
        shares = _by_class(known, part, clients, seed) if by_class else _dirichlet(part, clients, seed)
        owners = []
        for name, rows in named:
            owner = np.empty(len(rows), dtype=np.int64)
            for c in np.unique(labels[rows]):
                rng = generator(seed, "partition", part.name, "rows", name, int(c))
                places = rng.permutation(np.flatnonzero(labels[rows] == c))
                owner[places] = shares(int(c), len(places))
            owners.append(owner)
    owners.append(own_test(table, test, train, owners[0], clients, seed))
    return number_names("client", clients, 2), owners


def _dirichlet(part: PartitionSpec, clients: int, seed: int) -> Callable[[int, int], Owner]:
    """A function that returns the owners of a class's rows, given the class and the number of its rows."""

    def shares(c: int, count: int) -> Owner:
        # The stream restarts for each split, so training and validation rows have the same shares.
        rng = generator(seed, "partition", "dirichlet", c)
        p = dirichlet(part.alpha or 0.0, clients, rng)
        return np.repeat(np.arange(clients), apportion(p, count, rng))

    return shares


def dirichlet(alpha: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Shares (K,) from Dir(alpha 1_K), summing to 1."""
    if alpha > 1e-9:
        return rng.dirichlet(np.full(clients, alpha))
    # In the limit alpha -> 0, one client, drawn uniformly, gets all rows. NumPy would return only zeros there.
    p = np.zeros(clients)
    p[rng.integers(clients)] = 1.0
    return p


def _by_class(classes: np.ndarray, part: PartitionSpec, clients: int, seed: int) -> Callable[[int, int], Owner]:
    """As :func:`_dirichlet`, but by the rule ``by_class``; ``classes`` are the classes that have rows."""
    each, key = part.classes_per_client or 0, "data.partition.classes_per_client"
    if each > len(classes):
        raise InputError(f"{key}: {each} classes per client, but the training rows have {len(classes)}", key=key)
    if each * clients < len(classes):
        raise InputError(
            f"{key}: {clients} clients of {each} classes have at most {each * clients} of {len(classes)} classes, and "
            f"every row belongs to a client: raise the key to {-(-len(classes) // clients)}, "
            f"or clients to {-(-len(classes) // each)}",
            key=key,
        )
    # Each client in turn takes the classes that have the fewest clients so far; ties are broken at random. So the
    # classes' numbers of clients differ by at most one.
    rng = generator(seed, "partition", "by_class")
    held = np.zeros(len(classes), dtype=np.int64)
    holders: dict[int, list[int]] = {int(c): [] for c in classes}
    for k in rng.permutation(clients):
        chosen = np.lexsort((rng.random(len(classes)), held))[:each]
        held[chosen] += 1
        for c in classes[chosen]:
            holders[int(c)].append(int(k))
    return lambda c, count: np.array(holders[c])[np.arange(count) % len(holders[c])]
