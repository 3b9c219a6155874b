"""The "masked" protocol of BlindFed under CKKS, server half: encrypted rows pass the model, batch after batch.

A batch is a session of its own. Its encrypted states are on the server's disk after every block, so that a killed run
goes on there; a session that goes on has new masks and a new name. The masks' statistical distance is entered before
anything is sent, and is never forgotten.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.errors import InputError
from fedfm.methods.blindfed.encrypted import Checkpoint, Holder, Owner
from fedfm.methods.blindfed.foundation import check
from fedfm.methods.blindfed.holding import Opened, of_bytes, pack, spans, to_bytes, unpack
from fedfm.methods.blindfed.passing import Passing, rows_of
from fedfm.models.fhe_friendly import folded
from fedfm.models.side_adapter import STATES, SideModel
from fedfm.privacy.crypto import keys
from fedfm.privacy.crypto.refresh import DistanceLedger

if TYPE_CHECKING:
    from fedfm.methods.blindfed.blindfed import BlindFed


class Gone(Exception):
    """A client gave no valid reply: it takes no further part in the passes."""


def passed(method: BlindFed, fed: Federation) -> dict[str, float]:
    """All rows pass the server's model, encrypted; figures for the result."""
    return Run(method, fed, Passing.begin(fed, check(fed.model, method.foundation))).go()


@dataclass
class Run:
    """The passes of all clients.

    Attributes:
        figures: seconds, bytes and rows so far, of this process and of killed ones before it.
    """

    method: BlindFed
    fed: Federation
    passing: Passing
    figures: dict[str, float] = field(default_factory=dict)

    def go(self) -> dict[str, float]:
        """Every batch that has not passed yet."""
        fed, passing = self.fed, self.passing
        self._open()
        self.figures = json.loads(fed.store["figures"]) if "figures" in fed.store else {}
        jobs = [
            (client, batch)
            for client, opened in sorted(passing.opened.items())
            for batch in range(len(spans(opened.rows, passing.batch)))
        ]
        left = [(client, batch) for client, batch in jobs if batch >= passing.done.get(client, 0)]
        gone: set[ClientId] = set()
        for number, (client, batch) in enumerate(left):
            if client in gone:
                continue
            try:
                self._batch(client, batch, lambda part, i=number: self._tell((i + part) / len(left)))  # type: ignore[misc]
            except Gone:
                gone.add(client)
        return self._result()

    def _open(self) -> None:
        """Numbers of rows and evaluation keys; a resumed run has those that were sent."""
        fed, passing = self.fed, self.passing
        known = {c: fed.store[f"opened-{c}"] for c in fed.clients if f"opened-{c}" in fed.store}
        passing.opened = {client: unpack(data, Opened) for client, data in known.items()}
        if new := [client for client in fed.clients if client not in known]:
            public = of_bytes(keys.public_of(fed.secret("channel")))
            least = max(0, fed.min_clients - len(known))
            told = passing.hello(key=public)
            for client, opened in fed.ask(self.method.open, of=new, least=least, form="encrypted", told=told).items():
                fed.store[f"opened-{client}"] = pack(opened)
                passing.opened[client] = opened

    def _batch(self, client: ClientId, batch: int, tell: Callable[[float], None]) -> None:
        """One batch, from its last block on."""
        method, store, begun = self.method, self.fed.store, time.monotonic()
        opened, place = self.passing.opened[client], f"states-{client}-{batch}"
        start = Checkpoint.from_bytes(store[place]) if place in store else None
        session = os.urandom(16)
        owner = self._owner(opened, session, self._ledger(client))
        blocks, crossed = self.passing.model.net.shape[0], 0

        def ask(handler: Callable[..., Any], **payload: Any) -> Any:
            nonlocal crossed
            found = self.fed.ask(handler, of=[client], least=0, form="encrypted", **payload)
            if client not in found:
                raise Gone
            crossed += sum(x.numel() for x in (*payload.values(), found[client]) if isinstance(x, Tensor))
            return found[client]

        def exchange(message: bytes) -> bytes:
            self.figures["refreshes"] = self.figures.get("refreshes", 0) + 1
            return to_bytes(ask(method.refresh, down="encrypted", message=of_bytes(message)))

        def release(block: int, message: bytes) -> None:
            ask(method.keep, down="encrypted", batch=batch, block=block + 1, states=of_bytes(message))
            tell((block + 1) / blocks)

        def save(checkpoint: Checkpoint) -> None:
            nonlocal begun, crossed
            if checkpoint.blocks < blocks:
                store[place] = checkpoint.to_bytes()
            self._count(seconds=time.monotonic() - begun, bytes=crossed)
            begun, crossed = time.monotonic(), 0

        rows = ask(method.rows, batch=batch, session=of_bytes(session), go_on=start is not None)
        owner.run(to_bytes(rows), exchange, release, start, save)
        self.passing.finished([client], batch)
        store.pop(place, None)
        self._count(rows=len_of(opened, self.passing.batch, batch))

    def _owner(self, opened: Opened, session: bytes, ledger: DistanceLedger) -> Owner:
        key = keys.agree(self.fed.secret("channel"), to_bytes(opened.key), session)
        return owner_of(self.passing.model, to_bytes(opened.keys), session, key, ledger)

    def _ledger(self, client: ClientId) -> DistanceLedger:
        """The client's, as far as it was spent."""
        place, store = f"distance-{client}", self.fed.store
        found = json.loads(store[place]) if place in store else {"spent": 0.0, "ciphertexts": 0}

        def keep(ledger: DistanceLedger) -> None:
            store[place] = json.dumps({"spent": ledger.spent, "ciphertexts": ledger.ciphertexts}).encode()

        return DistanceLedger(spent=found["spent"], ciphertexts=found["ciphertexts"], keep=keep)

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self.figures[name] = self.figures.get(name, 0) + value
        self.fed.store["figures"] = json.dumps(self.figures).encode()

    def _tell(self, part: float) -> None:
        self.passing.tell(part, "encrypted rows pass the server's model")

    def _result(self) -> dict[str, float]:
        found, rows = self.figures, max(self.figures.get("rows", 0), 1)
        spent = [self._ledger(client).spent for client in self.passing.opened]
        return {
            "seconds_per_sample": found.get("seconds", 0.0) / rows,
            "ciphertext_bytes": found.get("bytes", 0.0) / rows,
            "refreshes": found.get("refreshes", 0.0),
            "encrypted_rows": found.get("rows", 0.0),
            "statistical_distance": max(spent, default=0.0),
        }


def owner_of(model: SideModel, public: bytes, session: bytes, key: bytes, ledger: DistanceLedger) -> Owner:
    """The model's owner in one session."""
    backbone, release, _ = model.owned
    projection = None if release.projection is None else release.projection.double().numpy().T
    kind = model.adaptation_spec.released
    return Owner(folded(backbone.module), kind, public, session, key, ledger, projection=projection)


def in_one_place(model: SideModel, rows: Rows) -> Rows:
    """Rows of pixel values as released states, by the whole protocol between a new holder and the owner.

    Raises:
        InputError: the rows are no pictures.
    """
    if "pixel_values" not in rows.tensors:
        raise InputError("encrypted passes take pictures")
    matrices = folded(model.owned[0].module)
    holder = Holder.new(len(matrices.positions))
    public, ledger, blocks = holder.public(), DistanceLedger(), model.net.shape[0]
    done = [torch.zeros(0, *model.net.shape)]
    for part in Rows(rows.tensors).batches(holder.layout.samples):
        session, key = os.urandom(16), os.urandom(32)
        holder.begin(session, key)
        x = matrices.patch(part["pixel_values"]).double().numpy()
        states: list[np.ndarray] = []

        def release(block: int, message: bytes, n: int = len(x), states: list[np.ndarray] = states) -> None:
            states.append(holder.released(message, n))

        owner_of(model, public, session, key, ledger).run(holder.rows(x), holder.refresh, release)
        holder.end(session)
        if len(states) != blocks:
            raise InputError(f"{len(states)} of {blocks} blocks were released")
        done.append(torch.from_numpy(np.stack(states, 1)))
    return Rows({STATES: torch.cat(done)}, labels=rows.labels)


def len_of(opened: Opened, size: int, batch: int) -> int:
    """Rows of a batch."""
    return min(size, rows_of(opened) - batch * size)
