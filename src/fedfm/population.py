"""Population: an experiment's rows and its model, and what each client holds of them."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedfm import store
from fedfm.data.table import ClientRows, FederatedData
from fedfm.errors import InputError
from fedfm.experiment import Experiment
from fedfm.federation import ClientData, ClientId
from fedfm.method import Method
from fedfm.methods.centralised import POOLED
from fedfm.params import Params
from fedfm.rows import Rows

if TYPE_CHECKING:
    from fedfm.progress import Progress
    from fedfm.rundir import Run

_TIDY = 50  # preparations of rows between two looks at the heap


class Partitioned:
    """All clients of an experiment in one place; each one's rows are prepared when they are first used, and kept.

    Attributes:
        federated: the table and who holds which rows.
        model: the model that clients train.
    """

    def __init__(self, federated: FederatedData, model: Any) -> None:
        self.federated, self.model = federated, model
        self._data: dict[ClientId, ClientData] = {}
        self._prepared = 0

    @property
    def clients(self) -> Sequence[ClientId]:
        """Names, sorted."""
        return sorted(self.federated.clients)

    def data(self, client: ClientId) -> ClientData:
        """The client's rows, ready for the model; with a frozen backbone these are its features, computed once."""
        if client not in self._data:
            rows = self._pooled() if client == POOLED else self.federated.clients[client]
            self._data[client] = ClientData(
                *(functools.partial(self.rows, index) for index in (rows.train, rows.val, rows.test))
            )
        return self._data[client]

    def _pooled(self) -> ClientRows:
        everyone = [self.federated.clients[c] for c in self.clients]
        train, val = (np.sort(np.concatenate([getattr(c, part) for c in everyone])) for part in ("train", "val"))
        return ClientRows(train, val, np.sort(self.federated.test))

    def rows(self, index: np.ndarray) -> Rows:
        """Rows of the table, ready for the model."""
        rows: Rows = self.model.prepare(self.federated.table, index)
        rows = self.model.encode(rows) if len(rows) else rows
        self._prepared += 1
        if self._prepared % _TIDY == 0:
            _trim_heap()
        return rows

    @functools.cached_property
    def test(self) -> Rows:
        """The global test rows."""
        return self.rows(self.federated.test)


def _trim_heap() -> None:
    """Give back the pages between what is kept: glibc keeps what large intermediate results leave behind."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def populate(experiment: Experiment) -> Partitioned:
    """Read the data, deal them, load the model.

    Raises:
        InputError: with the place in the experiment or the file.
    """
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal
    from fedfm.models.load import load_model

    if experiment.in_memory:
        raise InputError(
            "data and model of this run were given from Python: call fedfm.federate(...) again with the same out"
        )
    seed = experiment.run.seed
    table = load_table(experiment.data, seed=seed, task=experiment.model.task)
    federated = deal(table, experiment.data, seed=seed)
    model = load_model(
        experiment.model,
        classes=table.classes,
        kind=table.kind,
        task=experiment.model.task,
        seed=seed,
        feature_dim=table.inputs.shape[1] if table.kind == "features" else None,
    )
    model.kernels = experiment.run.kernels
    return Partitioned(federated, model)


def describe(run: Run, population: Partitioned, progress: Progress) -> None:
    """Write into the manifest what was read: clients, split, fingerprints, notices; refuse a resume on other data."""
    from fedfm.data.partition import summary
    from fedfm.data.table import fingerprint

    table = population.federated.table
    prints = {"data": fingerprint(table), "model": population.model.fingerprint}
    before = run.manifest["fingerprints"]
    for name, value in prints.items():
        if before and before.get(name) != value:
            raise InputError(f"the {name} changed since this run began: a resumed run needs what it started with")
    notices = list(population.federated.notices)
    for notice in notices:
        progress.notice(notice)
    run.manifest |= {
        "clients": list(population.clients),
        "split": summary(population.federated),
        "fingerprints": prints,
        "model": {
            "classes": list(table.classes),
            "kind": table.kind,
            "feature_dim": table.inputs.shape[1] if table.kind == "features" else None,
            "trainable": sum(population.model.layout.sizes.values()),
        },
        "notices": [n for n in run.manifest["notices"] if n not in notices] + notices,
    }
    run.write_manifest()


def judge(population: Partitioned, method: Method[Any]) -> Callable[[Params], dict[str, Any]] | None:
    """Metrics of a method's parameters on the global test rows; None where there are none."""
    if not len(population.federated.test):
        return None

    return lambda w: method.scores(population.model, w, population.test)


def record_error(folder: Path, client: ClientId, text: str) -> None:
    """A client's traceback, kept where only its owner looks."""
    with open(folder / "private" / "errors.log", "a", encoding="utf-8", opener=store.private) as file:
        file.write(f"--- {client}\n{text}\n")
