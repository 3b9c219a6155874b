"""Rows that would count twice in the sums of a run: a newcomer's rows that another client has already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedfm.data.repeats import comparable, count_common
from fedfm.data.table import Table
from fedfm.errors import InputError
from fedfm.runtime.partitioned import Partitioned
from fedfm.runtime.population import populate
from fedfm.runtime.run_directory import Run


def notices(run: Run, name: str, population: Partitioned, read: Callable[[str, str], Partitioned]) -> list[str]:
    """Notices about a newcomer's training rows that are in the sums already, as far as anybody here can tell.

    Args:
        read: the rows of an earlier newcomer, from its name and its file.
    """
    table, rows = population.federated.table, population.federated.clients[name].train
    if not comparable(table):
        return []
    found = list[str]()
    for client, theirs, held in _others(run, read, found):
        if count := count_common(table, rows, theirs, held):
            found.append(
                f"{count} of {len(rows)} training rows are also training rows of {client}: they count twice in the sums"
            )
    return found


def _others(
    run: Run, read: Callable[[str, str], Partitioned], unread: list[str]
) -> Iterator[tuple[str, Table, np.ndarray]]:
    """The clients of the run and the earlier newcomers, each with its table and training rows; adds who is unread."""
    parts, twice = dict[str, Partitioned](), "equal rows count twice, unseen"
    newcomers: Mapping[str, Mapping[str, Any]] = run.manifest.get("newcomers", {})
    for name, of in newcomers.items():
        try:
            parts[name] = read(name, of["data"])
        except InputError:
            unread.append(f"the rows of {name}, who joined before, cannot be read at {of['data']}: {twice}")
    everybody = None
    if run.manifest["split"] is not None:
        with contextlib.suppress(InputError):
            everybody = populate(run.experiment)
    if everybody is None:
        unread.append(f"the rows of the run's clients are not on this machine: {twice}")
    else:
        parts |= dict.fromkeys(everybody.federated.clients, everybody)
    for name, part in parts.items():
        yield name, part.federated.table, part.federated.clients[name].train
