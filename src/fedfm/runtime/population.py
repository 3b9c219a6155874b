"""Population: an experiment's rows and model, and each client's share of the rows."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.attacks.attack import Attackers
from fedfm.config.experiment import Experiment
from fedfm.core import storage
from fedfm.core.capabilities import Costing, Modelled, Needs, ParametersAlone, ServerFoundation, Viewing
from fedfm.core.client import POOLED, ClientData, ClientId
from fedfm.core.libraries import refuse
from fedfm.core.method import Method
from fedfm.core.rows import Rows
from fedfm.core.text import complain
from fedfm.data.spec import WITHHELD
from fedfm.data.table import ClientRows, FederatedData, Table
from fedfm.errors import InputError, NotWritten
from fedfm.linalg.out_of_core import limit
from fedfm.models import devices, preprocessing
from fedfm.models.model import Model
from fedfm.runtime.row_cache import RowCache, encodes
from fedfm.training import TrainsLocally

_LOOK = 64  # training rows prepared to count the operations per row
REST = ""  # name of the piece of global test rows that no client holds
_TIDY = 50  # preparations of rows between two trims of the heap


class Partitioned:
    """All clients of an experiment in one place; a client's rows are prepared on first use, and kept.

    Attributes:
        federated: the table as read, and each client's rows of it.
        model: the experiment's model; None at a site of clients that have none.
        attackers: the clients that attack, and their attack; None if all are honest.
        client_model: the clients' model; None if it stays at the server.
        encode: from prepared rows to what clients train on, instead of the model's own; None: the model's.
    """

    def __init__(
        self,
        federated: FederatedData,
        model: Any,
        attackers: Attackers | None = None,
        *,
        shared: bool = True,
        augment: tuple[str, ...] = (),
    ) -> None:
        self.federated, self.model, self.attackers, self.augment = federated, model, attackers, augment
        self.client_model = model if shared else None
        self.encode: Callable[[Rows], Rows] | None = None
        self.cache = RowCache(model) if isinstance(model, Model) else None
        self._data: dict[ClientId, ClientData] = {}
        self._prepared = self._pictures = 0

    @property
    def clients(self) -> Sequence[ClientId]:
        return sorted(self.federated.clients)

    def data(self, client: ClientId) -> ClientData:
        """The client's rows, ready for the model; with a frozen backbone, their features, computed once.

        Prepared pictures that exceed ``FEDFM_MEMORY`` are prepared again when they are needed.
        """
        if client not in self._data:
            self._forget_pictures()
            rows = self._pooled() if client == POOLED else self.federated.clients[client]
            make = (
                self.rows
                if self.client_model is not None
                else functools.partial(preprocessing.bare, self.federated.table)
            )
            train, val, test = (functools.partial(make, index) for index in (rows.train, rows.val, rows.test))
            if self.attackers is not None and client in self.attackers.names:
                train = functools.partial(self._poisoned, self.attackers, client, rows.train)
            if self.augment:
                train = functools.partial(self._augmented, train)
            self._data[client] = ClientData(train, val, test)
        return self._data[client]

    def _forget_pictures(self) -> None:
        """Drop those of the clients seen last until the rest fits: clients take turns, so the first stay useful."""
        if self._pictures <= limit():
            return
        sizes = {client: sum(map(_picture_bytes, data.ready)) for client, data in self._data.items()}
        self._pictures = sum(sizes.values())
        for client in reversed(sizes):
            if sizes[client] and self._pictures > limit():
                self._pictures -= sizes[client]
                del self._data[client]

    def _poisoned(self, attackers: Attackers, client: ClientId, index: np.ndarray) -> Rows:
        return self._ready(attackers.poison(client, self.federated.table.take(index)), np.arange(len(index)))

    def _augmented(self, make: Callable[[], Rows]) -> Rows:
        return replace(make(), augment=self.augment)

    def _pooled(self) -> ClientRows:
        everyone = [self.federated.clients[c] for c in self.clients]
        train, val = (np.sort(np.concatenate([getattr(c, part) for c in everyone])) for part in ("train", "val"))
        return ClientRows(train, val, np.sort(self.federated.test))

    def rows(self, index: np.ndarray) -> Rows:
        """Rows of the table, ready for the model."""
        return self._ready(self.federated.table, index)

    def _ready(self, table: Table, index: np.ndarray) -> Rows:
        make = functools.partial(self._made, table, index)
        kept = self.cache if self.encode is None and table is self.federated.table else None
        rows = make() if kept is None else kept.rows(table, index, make)
        self._pictures += _picture_bytes(rows)
        self._prepared += 1
        if self._prepared % _TIDY == 0:
            _trim_heap()
        return rows

    def _made(self, table: Table, index: np.ndarray) -> Rows:
        rows: Rows = self.model.prepare(table, index)
        return (self.encode or self.model.encode)(rows) if len(rows) else rows

    @functools.cached_property
    def test(self) -> Rows:
        return self.rows(self.federated.test)

    @functools.cached_property
    def triggered(self) -> Rows | None:
        """The global test rows outside of a backdoor's target class, with its trigger; None without a backdoor."""
        table, test = self.federated.table, self.federated.test
        if self.attackers is None or table.labels is None:
            return None
        attack = self.attackers.attack
        marked = attack.trigger(table.take(test[table.labels[test] != attack.target_of(table.classes)]))
        return None if marked is None or not len(marked) else self._ready(marked, np.arange(len(marked)))

    @functools.cached_property
    def pieces(self) -> dict[ClientId, np.ndarray]:
        """Partition of the global test rows: those of clients in order of names, then the others under ""."""
        left = set(self.federated.test.tolist())
        found = {}
        for client in self.clients:
            index = self.federated.clients[client].test
            if len(index) and left.issuperset(index.tolist()):
                left.difference_update(index.tolist())
                found[client] = index
        return found | ({REST: np.array(sorted(left))} if left else {})

    def piece(self, name: ClientId) -> Rows:
        """The rows of a piece; a client's piece is the very object that the client evaluates."""
        return self._rest if name == REST else self.data(name).test

    @functools.cached_property
    def _rest(self) -> Rows:
        return self.rows(self.pieces[REST])

    @property
    def packed(self) -> bool:
        """Whether clients train on blocks of their joined rows (see :func:`fedfm.models.preprocessing.passages`)."""
        return preprocessing.packs(
            self.federated.table.kind, self.model.task if isinstance(self.model, Model) else None
        )

    def counts(self) -> dict[ClientId, tuple[int, int, int]]:
        """Training, validation and test rows of each client, as it uses them.

        Of running text these are the blocks, which a tokenizer has to count.
        """
        held: Callable[[ClientId], ClientData | ClientRows]
        held = self.data if self.packed else self.federated.clients.__getitem__
        return {c: (len(held(c).train), len(held(c).val), len(held(c).test)) for c in self.clients}

    def sizes(self) -> dict[ClientId, int]:
        """Number of rows that each client trains on, as of :meth:`counts`."""
        return {client: train for client, (train, _, _) in self.counts().items()}

    def summary(self) -> dict[str, Any]:
        """The numbers of rows, as :func:`fedfm.data.partition.summary` has them, counted as of :meth:`counts`."""
        from fedfm.data.partition import summary

        found = summary(self.federated)
        if not self.packed:
            return found
        for client, counts in self.counts().items():
            for part, count in zip(("train", "val", "test"), counts, strict=True):
                found["clients"][client][part]["rows"] = count
        return found | {"test": found["test"] | {"rows": len(self.test)}}

    def labels(self, index: np.ndarray) -> Tensor:
        """Labels (n,) of rows of the table."""
        return torch.from_numpy(np.asarray(self.federated.table.labels, dtype=np.int64)[index])


def _picture_bytes(rows: Rows) -> int:
    return rows.tensors["pixel_values"].nbytes if "pixel_values" in rows.tensors else 0


def _trim_heap() -> None:
    """Return free pages to the system: glibc keeps those of large intermediate results."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def populate(experiment: Experiment, *, server: bool = False) -> Partitioned:
    """Read the data, partition them, load the model.

    Args:
        server: for a server without clients in this process: one that judges nothing loads no frozen weights.

    Raises:
        InputError: with the key of the experiment or the place in the file.
    """
    from fedfm.data.load import load_table
    from fedfm.data.partition import deal

    if experiment.in_memory:
        raise InputError(
            "data and model of this run were given from Python: call fedfm.federate(...) again with the same out"
        )
    if isinstance(experiment.method, Modelled) and experiment.model.name != WITHHELD:
        experiment.method.check_model()
    if experiment.own_code:
        from fedfm.runtime import user_population

        return user_population.of_experiment(experiment)
    seed = experiment.run.seed
    with refuse("data: a library cannot read these rows"):
        table = load_table(experiment.data, seed=seed, task=experiment.model.task)
        federated = deal(table, experiment.data, seed=seed)
    if experiment.model.name == WITHHELD:  # at a site: only the server has the model
        return Partitioned(federated, None)
    idle = server and not len(federated.test) and handles_parameters(experiment)
    model = model_of(experiment, table, hollow=idle)
    clients, attack, attackers = sorted(federated.clients), experiment.attack, None
    if attack is not None:
        attack.fits(table.kind, model.task, model, table.classes)
        attackers = Attackers(attack, clients, seed, model.task)
    shared, augment = experiment.method.needs.model == "everybody", augmentation(experiment, table, model)
    return Partitioned(federated, model, attackers, shared=shared, augment=augment)


def handles_parameters(experiment: Experiment) -> bool:
    """Whether the server half declares that it computes with parameters alone, and with no output of the model."""
    method: Any = experiment.method
    declared = isinstance(method, ParametersAlone) and "parameters_alone" in vars(type(method))
    plain = isinstance(method, TrainsLocally) and not isinstance(method, ServerFoundation | Viewing | Modelled)
    return declared and plain and method.needs == Needs() and experiment.attack is None


def model_of(experiment: Experiment, table: Table, *, hollow: bool = False) -> Model:
    """The experiment's model for the rows of a table; ``hollow`` as of :func:`fedfm.models.load.load_model`."""
    from fedfm.models.load import load_model

    if experiment.run.deterministic:
        devices.make_deterministic()
    spec, dim = experiment.model, feature_dim(table)
    model = load_model(
        spec,
        classes=table.classes,
        kind=table.kind,
        task=spec.task,
        seed=experiment.run.seed,
        feature_dim=dim,
        head_bias=experiment.method.needs.bias,
        hollow=hollow,
    )
    model.kernels, model.loaders = experiment.run.kernels, experiment.run.loader_workers
    return model


def augmentation(experiment: Experiment, table: Table, model: Model) -> tuple[str, ...]:
    """``data.augment``, if the clients train on pictures.

    Raises:
        InputError: they do not, with the reason.
    """
    from fedfm.data.table import words_of

    names = experiment.data.augment
    if names and table.kind != "image":
        raise InputError(f"data.augment: it changes pictures, and {table.source} holds {words_of(table.kind)}; drop it")
    if names and encodes(model):
        raise InputError(
            "data.augment: the frozen part of this model reads each picture once, and its features are trained on; "
            'drop it, or train what reads pictures, e.g. model.adaptation.name = "lora"'
        )
    return names


def feature_dim(table: Table) -> int | None:
    """The width d of rows that are feature vectors (N, d); None for others."""
    return table.inputs.shape[1] if table.kind == "features" else None


def operations(method: Method[Any], population: Partitioned) -> dict[str, Any] | None:
    """The ledger's multiply-accumulates before the first round (see ``models.operations``).

    None for a method without a client optimiser, and for rows that only the user's own Python module can read.
    """
    from fedfm.models.multiply_accumulates import Costs, per_sample

    table = population.federated.table
    if not isinstance(method, TrainsLocally) or method.needs.pooled or table.kind == "own":
        return None
    model, clients = population.model, [population.federated.clients[c] for c in population.clients]
    samples = list(population.sizes().values())
    first = next((rows.train[:_LOOK] for rows in clients if len(rows.train)), None)
    macs = None if first is None else per_sample(model, model.prepare(table, first), method.local.batch_size)
    if macs is None:
        return None
    costs = Costs.of(macs, method.passes if isinstance(method, Costing) else method.local.passes, samples)
    return asdict(costs) | {"macs_per_client_round": costs.macs_per_client_round}


def record_error(folder: Path, client: ClientId, text: str) -> None:
    """Keep a client's traceback in a file that only its owner reads; print its last line if the disk takes no more."""
    try:
        storage.append(folder / "private" / "errors.log", f"--- {client}\n{text}\n")
    except NotWritten as error:
        last = text.rstrip().rpartition("\n")[2]
        complain(f"{error}: {client}: {last}")
