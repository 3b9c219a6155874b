"""All clients of an experiment in one place, each with its rows."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import POOLED, ClientData, ClientId
from fedfm.core.rows import Rows
from fedfm.core.transcript import MANY
from fedfm.data.table import PARTS, ClientRows, FederatedData, Table
from fedfm.linalg.out_of_core import limit
from fedfm.models import preprocessing
from fedfm.models.model import Model
from fedfm.runtime.row_cache import RowCache

if TYPE_CHECKING:
    from fedfm.attacks.attackers import Attackers

REST = ""  # name of the piece with the global test rows that no client has
_TIDY = 50  # number of times that rows are prepared before the heap is trimmed


class Partitioned:
    """All clients of an experiment in one place. A client's rows are prepared on first use and then kept.

    Attributes:
        federated: the table, and the indices of each client's rows in it.
        model_or_none: the experiment's model; None at a silo whose clients have no model.
        attackers: the clients that attack, and their attack; None if all clients are honest.
        client_model: the clients' model; None if only the server has it.
        encode: maps prepared rows to the rows that clients train on; None for the model's own encoding.
    """

    def __init__(
        self,
        federated: FederatedData,
        model: Model | None,
        attackers: Attackers | None = None,
        *,
        shared: bool = True,
        augment: tuple[str, ...] = (),
    ) -> None:
        self.federated, self.attackers, self.augment = federated, attackers, augment
        self.model_or_none = model
        self.client_model = model if shared else None
        self.encode: Callable[[Rows], Rows] | None = None
        self.cache = RowCache(model) if isinstance(model, Model) else None
        self._clients, self._data = sorted(federated.clients), dict[ClientId, ClientData]()
        self._prepared = self._image_memory = 0

    @property
    def model(self) -> Model:
        """The experiment's model.

        Raises:
            RuntimeError: there is no model.
        """
        if self.model_or_none is None:
            raise RuntimeError("the clients of this method have no model")
        return self.model_or_none

    @property
    def clients(self) -> Sequence[ClientId]:
        return self._clients

    def data(self, client: ClientId) -> ClientData:
        """Return the client's rows, ready for the model; with a frozen backbone they are features, computed once.

        Prepared images beyond ``FEDFM_MEMORY`` are dropped, and prepared again when they are used next. So are feature
        vectors from the table, beyond very many clients.
        """
        if client not in self._data:
            self._forget_images()
            if self.federated.table.kind == "features" and len(self._data) >= MANY:
                del self._data[next(iter(self._data))]  # feature vectors are quickly prepared again
            rows = self._pool() if client == POOLED else self.federated.clients[client]
            make = (
                self.rows
                if self.client_model is not None
                else functools.partial(preprocessing.bare, self.federated.table)
            )
            train, val, test = (functools.partial(make, index) for index in (rows.train, rows.val, rows.test))
            if self.attackers is not None and client in self.attackers.names:
                train = functools.partial(self._poison, self.attackers, client, rows.train)
            if self.augment:
                train = functools.partial(self._augment, train)
            self._data[client] = ClientData(train, val, test)
            self._data[client].table = functools.partial(self.federated.table.take, rows.train)
        return self._data[client]

    def _forget_images(self) -> None:
        """Drop prepared images, the last clients' images first, until the rest fits into the memory limit.

        Clients take turns, so the images of the first clients are used next.
        """
        if self._image_memory <= limit():
            return
        sizes = {client: sum(map(_image_bytes, data.ready)) for client, data in self._data.items()}
        self._image_memory = sum(sizes.values())
        for client in reversed(sizes):
            if sizes[client] and self._image_memory > limit():
                self._image_memory -= sizes[client]
                del self._data[client]

    def _poison(self, attackers: Attackers, client: ClientId, index: np.ndarray) -> Rows:
        return self._ready(attackers.poison(client, self.federated.table.take(index)), np.arange(len(index)))

    def _augment(self, make: Callable[[], Rows]) -> Rows:
        return replace(make(), augment=self.augment)

    def _pool(self) -> ClientRows:
        train, val = (np.sort(self.federated.all_rows(part)) for part in ("train", "val"))
        return ClientRows(train, val, np.sort(self.federated.test))

    def rows(self, index: np.ndarray) -> Rows:
        """Return rows of the table, ready for the model."""
        return self._ready(self.federated.table, index)

    def _ready(self, table: Table, index: np.ndarray) -> Rows:
        make = functools.partial(self._make, table, index)
        kept = self.cache if self.encode is None and table is self.federated.table else None
        rows = make() if kept is None else kept.rows(table, index, make)
        self._image_memory += _image_bytes(rows)
        self._prepared += 1
        if self._prepared % _TIDY == 0:
            trim_heap()
        return rows

    def _make(self, table: Table, index: np.ndarray) -> Rows:
        rows: Rows = self.model.prepare(table, index)
        return (self.encode or self.model.encode)(rows) if len(rows) else rows

    @functools.cached_property
    def test(self) -> Rows:
        return self.rows(self.federated.test)

    @functools.cached_property
    def trigger_rows(self) -> Rows | None:
        """The global test rows with a backdoor's trigger, except rows of its target class; None without a backdoor."""
        table, test = self.federated.table, self.federated.test
        if self.attackers is None or table.labels is None:
            return None
        attack = self.attackers.attack
        marked = attack.trigger(table.take(test[table.labels[test] != attack.target_of(table.classes)]))
        return None if marked is None or not len(marked) else self._ready(marked, np.arange(len(marked)))

    @functools.cached_property
    def pieces(self) -> dict[ClientId, np.ndarray]:
        """Partition the global test rows: each client's indices in order of names, then all others under ""."""
        left = set(self.federated.test.tolist())
        found = {}
        for client in self.clients:
            index = self.federated.clients[client].test
            if len(index) and left.issuperset(index.tolist()):
                left.difference_update(index.tolist())
                found[client] = index
        return found | ({REST: np.array(sorted(left))} if left else {})

    def piece(self, name: ClientId) -> Rows:
        """Return the rows of a piece; a client's piece is the same object that the client itself evaluates."""
        return self._rest if name == REST else self.data(name).test

    @functools.cached_property
    def _rest(self) -> Rows:
        return self.rows(self.pieces[REST])

    @property
    def trains_on_blocks(self) -> bool:
        """Whether clients train on blocks of their joined rows, see :func:`fedfm.models.language.encoding.passages`."""
        return preprocessing.packs(
            self.federated.table.kind, self.model_or_none.task if isinstance(self.model_or_none, Model) else None
        )

    def counts(self) -> dict[ClientId, tuple[int, int, int]]:
        """Return each client's numbers of training, validation and test rows, as the client uses them.

        With running text a row is a block of tokens, so the texts are tokenized to count the blocks.
        """
        if self.trains_on_blocks:
            return {c: (len(of.train), len(of.val), len(of.test)) for c in self.clients for of in [self.data(c)]}
        sizes = zip(*(self.federated.sizes(part).tolist() for part in PARTS), strict=True)
        found = dict(zip(self.federated.clients, sizes, strict=True))
        return {c: found[c] for c in self.clients}

    def sizes(self) -> dict[ClientId, int]:
        """Return the number of rows that each client trains on, counted as in :meth:`counts`."""
        return {client: train for client, (train, _, _) in self.counts().items()}

    def summary(self) -> dict[str, Any]:
        """Return the numbers of :meth:`counts` in the form of :func:`fedfm.data.partition.summary`."""
        from fedfm.data.partition import summary

        if len(self.clients) > MANY:
            from fedfm.data.split_sums import sums

            found = summary(replace(self.federated, clients={})) | sums(self.federated, list(self.counts().values()))
            del found["clients"]
            return found
        found = summary(self.federated)
        if not self.trains_on_blocks:
            return found
        for client, counts in self.counts().items():
            for part, count in zip(("train", "val", "test"), counts, strict=True):
                found["clients"][client][part]["rows"] = count
        return found | {"test": found["test"] | {"rows": len(self.test)}}

    def labels(self, index: np.ndarray) -> Tensor:
        """Return the labels (n,) of rows of the table."""
        return torch.from_numpy(np.asarray(self.federated.table.labels, dtype=np.int64)[index])


def _image_bytes(rows: Rows) -> int:
    return rows.tensors["pixel_values"].nbytes if "pixel_values" in rows.tensors else 0


def trim_heap() -> None:
    """Return free memory pages to the system; glibc would keep the pages of large intermediate results."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)
