"""Server half of BlindFed's "masked" protocol under CKKS: the encrypted forward pass, one batch after another.

Each batch has its own session. After every block the batch's encrypted states are written to the server's disk. A run
that was killed continues from these states, in a new session with new masks. The server stores the statistical distance
of masks before it sends masked ciphertexts, so that after a crash it knows the distance that was spent.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import ClientId, each
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.inference.messages import parameters_of
from fedfm.encrypted.inference.model_owner import Checkpoint, KeyHolder, ModelOwner
from fedfm.encrypted.inference.serialization import of_bytes, pack, to_bytes, unpack
from fedfm.encrypted.inference.worker_pool import EncryptedBatch, run_all
from fedfm.encrypted.protocol.client_sessions import keys_channel
from fedfm.encrypted.protocol.foundation_check import check
from fedfm.encrypted.protocol.handshake import Hello, Opened, RowSpan, spans
from fedfm.encrypted.protocol.out_of_range import replace_unlike
from fedfm.encrypted.protocol.server import ForwardPass
from fedfm.encrypted.protocol.text_rows import embed_ids
from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.input_limits import limits_of
from fedfm.encrypted.student.text_places import embedding_tables
from fedfm.errors import E_CLIENT, ClientFault, InputError
from fedfm.models.adapters.side_adapter import STATES, Release, SideModel
from fedfm.models.adapters.side_texts import text_places
from fedfm.privacy.crypto import keys

if TYPE_CHECKING:
    from fedfm.encrypted.protocol.protocol_method import ProtocolMethod


_SILENT = "it gave no valid reply"


def run(method: ProtocolMethod, fed: Federation) -> dict[str, float]:
    """Run the encrypted forward pass of all rows; return figures for the run's result."""
    return EncryptedForwardPass(
        method, fed, ForwardPass.begin(fed, check(fed.model, method.foundation), method.ring)
    ).go()


@dataclass
class EncryptedForwardPass:
    """The forward pass of all clients, which relays the messages of worker processes (:class:`.worker_pool.Relay`).

    Attributes:
        figures: seconds, bytes, refreshes and rows so far, including those of earlier, killed processes of the run.
        gone: clients that gave no valid reply, so that they no longer take part.
    """

    method: ProtocolMethod
    fed: Federation
    passing: ForwardPass
    figures: dict[str, float] = field(default_factory=dict)
    gone: set[ClientId] = field(default_factory=set)
    _begun: float = 0.0
    _blocks: int = 0
    _sent: int = 0

    def go(self) -> dict[str, float]:
        """Run every batch that is not complete."""
        fed, passing = self.fed, self.passing
        self._open()
        if "figures" in fed.store:
            self.figures = json.loads(fed.store["figures"])
        ledgers = {client: self._ledger(client) for client in passing.opened}
        jobs = [
            self._job(client, batch, ledgers[client])
            for client in sorted(passing.opened)
            for batch in range(len(self._spans(client)))
            if batch not in passing.done.get(client, ())
        ]
        self._begun, self._blocks = time.monotonic(), len(jobs) * passing.model.net.shape[0]
        backbone, release, _ = passing.model.frozen_parts
        count = self.method.processes or os.cpu_count() or 1
        kind = passing.model.adaptation_spec.released
        run_all(jobs, self, count, folded=fold(backbone.module), released=kind, projection=_rows_of(release))
        return self._result()

    def _open(self) -> None:
        """Ask clients for their evaluation keys and numbers of rows. A resumed run already has these answers."""
        fed, passing = self.fed, self.passing
        known = {c: fed.store[f"opened-{c}"] for c in fed.clients if f"opened-{c}" in fed.store}
        passing.opened = {client: unpack(data, Opened) for client, data in known.items()}
        if new := [client for client in fed.clients if client not in known]:
            public = of_bytes(keys.public_of(fed.secret("channel")))
            least = max(0, fed.enough(len(fed.clients)) - len(known))
            hello = self._hello(public)
            ask = partial(fed.ask, self.method.open, of=new, least=least, form="encrypted", check=self._check_keys)
            for client, opened in ask(hello=hello).items():
                fed.store[f"opened-{client}"] = pack(opened)
                passing.opened[client] = opened
            passing.count_bytes()

    def _check_keys(self, opened: Opened) -> None:
        self._public_keys(opened)

    def _public_keys(self, opened: Opened) -> bytes:
        """Check a client's evaluation keys, and return them.

        Raises:
            ClientFault: the evaluation keys or the key for agreements are not valid.
        """
        own, session = self.fed.secret("channel"), self.passing.session.hex()
        return keys_channel(own, to_bytes(opened.key), session, self.passing.ring, "server").unpack_keys(
            to_bytes(opened.keys)
        )

    def _hello(self, public: Tensor) -> Hello:
        return self.passing.hello(key=public)

    def _spans(self, client: ClientId) -> list[RowSpan]:
        return spans(self.passing.opened[client].rows, self.passing.batch)

    def _job(self, client: ClientId, batch: int, ledger: DistanceLedger) -> EncryptedBatch:
        opened, place, session = self.passing.opened[client], _place(client, batch), os.urandom(16)
        key = keys.agree(self.fed.secret("channel"), to_bytes(opened.key), session)
        start = Checkpoint.from_bytes(self.fed.store[place]) if place in self.fed.store else None
        return EncryptedBatch(client, batch, self._public_keys(opened), session, key, ledger, start)

    # --- the workers' relay -------------------------------------------------------------------------------------------
    def rows(self, job: EncryptedBatch) -> bytes:
        """Begin the session; return encrypted rows, or b"" if the server already has the rows' states."""
        session, go_on = of_bytes(job.session), job.start is not None
        return to_bytes(self._ask(job, self.method.rows, batch=job.batch, session=session, go_on=go_on))

    def refresh(self, job: EncryptedBatch, message: bytes) -> bytes:
        """Send a refresh to the client, and return the client's answer."""
        self.figures["refreshes"] = self.figures.get("refreshes", 0) + 1
        return to_bytes(self._ask(job, self.method.refresh, down="encrypted", message=of_bytes(message)))

    def refreshes(self, asked: Sequence[tuple[EncryptedBatch, bytes]]) -> list[bytes | ClientFault]:
        """Send refreshes of several batches together; each message to a client contains one refresh."""
        answers: list[bytes | ClientFault] = [ClientFault(E_CLIENT, _SILENT)] * len(asked)
        left = list(range(len(asked)))
        while left:
            turn = {asked[i][0].client: i for i in reversed(left)}
            left = [i for i in left if i not in turn.values()]
            here = {c: of_bytes(asked[i][1]) for c, i in turn.items() if c not in self.gone}
            if not here:
                continue
            found = self.fed.ask(
                self.method.refresh, of=here, least=0, form="encrypted", down="encrypted", message=each(here)
            )
            self.gone |= here.keys() - found.keys()
            self._count(here.values(), found.values())
            self.figures["refreshes"] = self.figures.get("refreshes", 0) + len(found)
            self.figures["exchanges"] = self.figures.get("exchanges", 0) + 1
            for client, answer in found.items():
                answers[turn[client]] = to_bytes(answer)
        return answers

    def release(self, job: EncryptedBatch, block: int, message: bytes) -> bytes | None:
        """Send a block's disclosed activations; after the last block the batch is complete."""
        self._ask(job, self.method.keep, down="encrypted", batch=job.batch, block=block + 1, states=of_bytes(message))
        if block + 1 == self.passing.model.net.shape[0]:
            self._finish_batch(job)
        return None

    def _finish_batch(self, job: EncryptedBatch) -> None:
        span = self._spans(job.client)[job.batch]
        self.figures["rows"] = self.figures.get("rows", 0) + span.stop - span.start
        self.passing.finish_batch([job.client], job.batch)
        self.fed.store.pop(_place(job.client, job.batch), None)
        self._note()

    def save(self, job: EncryptedBatch, checkpoint: bytes) -> None:
        """Store the encrypted states and the figures so far."""
        if job.batch not in self.passing.done.get(job.client, ()):
            self.fed.store[_place(job.client, job.batch)] = checkpoint
        self._note()
        self._sent += 1
        self.passing.tell(self._sent / self._blocks, "encrypted forward pass")

    def _ask(self, job: EncryptedBatch, handler: Callable[..., Any], **payload: Any) -> Any:
        client = job.client
        if client in self.gone:
            raise ClientFault(E_CLIENT, "the client gave no valid reply to an earlier message")
        found = self.fed.ask(handler, of=[client], least=0, form="encrypted", **payload)
        if client not in found:
            self.gone.add(client)
            raise ClientFault(E_CLIENT, _SILENT)
        came = found[client]
        self._count(payload.values(), came.values() if isinstance(came, dict) else [came])
        return found[client]

    def _count(self, *sides: Iterable[Any]) -> None:
        crossed = sum(x.nbytes for side in sides for x in side if isinstance(x, Tensor))
        self.figures["bytes"] = self.figures.get("bytes", 0) + crossed
        self.passing.count_bytes()

    # --- figures ------------------------------------------------------------------------------------------------------
    def _note(self) -> None:
        now = time.monotonic()
        self.figures["seconds"] = self.figures.get("seconds", 0) + now - self._begun
        self._begun = now
        self.fed.store["figures"] = json.dumps(self.figures).encode()

    def _ledger(self, client: ClientId) -> DistanceLedger:
        """Load the client's ledger, which includes the distance spent so far."""
        place, store = f"distance-{client}", self.fed.store
        found = json.loads(store[place]) if place in store else {"spent": 0.0, "ciphertexts": 0}

        def keep(ledger: DistanceLedger) -> None:
            store[place] = json.dumps({"spent": ledger.spent, "ciphertexts": ledger.ciphertexts}).encode()

        return DistanceLedger(spent=found["spent"], ciphertexts=int(found["ciphertexts"]), keep=keep)

    def _result(self) -> dict[str, float]:
        found, rows = self.figures, max(self.figures.get("rows", 0), 1)
        spent = [self._ledger(client).spent for client in self.passing.opened]
        return {
            "seconds_per_sample": found.get("seconds", 0.0) / rows,
            "ciphertext_bytes": found.get("bytes", 0.0) / rows,
            "refreshes": found.get("refreshes", 0.0),
            "exchanges": found.get("exchanges", 0.0),
            "encrypted_rows": found.get("rows", 0.0),
            "statistical_distance": max(spent, default=0.0),
        }


def _rows_of(release: Release) -> np.ndarray | None:
    """Return the matrix (p, d) of a projection; None without a projection."""
    return None if release.projection is None else np.ascontiguousarray(release.projection.double().numpy().T)


def _place(client: ClientId, batch: int) -> str:
    return f"states-{client}-{batch}"


def in_one_place(model: SideModel, rows: Rows, ring: int = 8192) -> Rows:
    """Compute disclosed activations of pixel rows by the complete protocol, with a new key holder in this process.

    Raises:
        InputError: the rows are not images.
    """
    backbone, released, _ = model.frozen_parts
    matrices, kind, projection = fold(backbone.module), model.adaptation_spec.released, _rows_of(released)
    holder = KeyHolder.new(len(matrices.positions), parameters_of(ring))
    public, ledger, blocks = holder.public(), DistanceLedger(), model.net.shape[0]
    done = [torch.zeros(0, *model.net.shape)]
    texts = bool(text_places(backbone.module))
    if not texts and "pixel_values" not in rows.names:
        raise InputError("an encrypted forward pass takes images")
    for part in replace(rows, labels=None).batches(holder.layout.samples):
        session, key = os.urandom(16), os.urandom(32)
        holder.begin(session, key)
        if texts:
            lengths = part["attention_mask"].sum(1)
            x = embed_ids(part["input_ids"], lengths, embedding_tables(backbone.module)).numpy()
            reasons = [""] * len(x)
        else:
            pixels, reasons = replace_unlike(part["pixel_values"], limits_of(backbone.module))
            x = matrices.patch(pixels).double().numpy()
        states: list[np.ndarray] = []

        def release(block: int, message: bytes, n: int = len(x), states: list[np.ndarray] = states) -> None:
            states.append(holder.decrypt_released(message, n))

        owner = ModelOwner(matrices, kind, public, session, key, ledger, projection=projection)
        owner.run(holder.rows(x), holder.refresh, release)
        holder.end(session)
        if len(states) != blocks:
            raise InputError(f"{len(states)} of {blocks} blocks were disclosed")
        fine = np.array([not reason for reason in reasons])
        done.append(torch.from_numpy(np.where(fine[:, None, None, None], np.stack(states, 1), np.float32(0))))
    return Rows({STATES: torch.cat(done)}, labels=rows.labels)
