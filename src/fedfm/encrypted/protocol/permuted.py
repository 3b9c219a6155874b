"""Server half of the "permuted" protocol under CKKS, with secret orders of rows (BlindFed, Sections 3.2 and 3.3).

Three things are as in :mod:`~fedfm.encrypted.protocol.masked`: each batch has its own session, its states are stored
after every block, and refreshes inside a block are masked.

After each block the client gets the states of all tokens of its rows in a secret order, and returns fresh encryptions
of these states. At the end the client gets its labels in the last order, and the relative orders
(:mod:`~fedfm.encrypted.protocol.permutations`): for each row in the list of one block, the row's position in the list
of the block before. The server sees neither rows nor labels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfm.core.client import ClientId
from fedfm.core.federation import Federation
from fedfm.core.rows import Rows
from fedfm.encrypted.ckks.refresh import DistanceLedger
from fedfm.encrypted.inference.messages import parameters_of
from fedfm.encrypted.inference.permuted_key_holder import PermutedKeyHolder
from fedfm.encrypted.inference.permuted_model_owner import PermutedModelOwner, join_messages, order_bytes
from fedfm.encrypted.inference.serialization import of_bytes, to_bytes
from fedfm.encrypted.inference.worker_pool import EncryptedBatch
from fedfm.encrypted.protocol import permutations
from fedfm.encrypted.protocol.foundation_check import check
from fedfm.encrypted.protocol.handshake import Hello, RowSpan, spans_by_part
from fedfm.encrypted.protocol.masked import EncryptedForwardPass
from fedfm.encrypted.protocol.out_of_range import replace_unlike
from fedfm.encrypted.protocol.server import ForwardPass
from fedfm.encrypted.student.folding import fold
from fedfm.encrypted.student.input_limits import limits_of
from fedfm.errors import InputError
from fedfm.models.adapters.side_adapter import STATES, SideModel

if TYPE_CHECKING:
    from fedfm.encrypted.protocol.protocol_method import ProtocolMethod


def run(method: ProtocolMethod, fed: Federation) -> dict[str, float]:
    """Run the encrypted forward pass of all rows in secret orders; return figures for the run's result."""
    return PermutedForwardPass(
        method, fed, ForwardPass.begin(fed, check(fed.model, method.foundation), method.ring)
    ).go()


@dataclass
class PermutedForwardPass(EncryptedForwardPass):
    """The forward pass of all clients in secret orders."""

    def rows(self, job: EncryptedBatch) -> bytes:
        """Begin the session; return encrypted labels, and encrypted rows unless the server has the rows' states."""
        session, go_on = of_bytes(job.session), job.start is not None
        sent = self._ask(job, self.method.labelled, batch=job.batch, session=session, go_on=go_on)
        return join_messages(to_bytes(sent["rows"]), to_bytes(sent["labels"]))

    def release(self, job: EncryptedBatch, block: int, message: bytes) -> bytes | None:
        """Send a block's states; the last call sends labels and relative orders, which completes the batch."""
        sent = of_bytes(message)
        if block < self._levels:
            answer = self._ask(job, self.method.turn, down="encrypted", batch=job.batch, block=block + 1, states=sent)
            return to_bytes(answer)
        steps = permutations.steps(self._orders(job.client, job.batch))
        self._ask(job, self.method.align, batch=job.batch, orders=steps, labels=sent)
        self._finish_batch(job)
        return None

    @property
    def _levels(self) -> int:
        return self.passing.model.net.shape[0]

    def _hello(self, public: Tensor) -> Hello:
        _, released, scales = self.passing.model.frozen_parts
        return self.passing.hello(key=public, release=released.positions, scales=scales)

    def _spans(self, client: ClientId) -> list[RowSpan]:
        return spans_by_part(self.passing.opened[client].rows, self.passing.batch)

    def _job(self, client: ClientId, batch: int, ledger: DistanceLedger) -> EncryptedBatch:
        orders = order_bytes([order.numpy() for order in self._orders(client, batch)])
        return replace(super()._job(client, batch, ledger), orders=orders)

    def _orders(self, client: ClientId, batch: int) -> list[Tensor]:
        span = self._spans(client)[batch]
        return permutations.draw_all(self.fed.secret("orders"), client, batch, self._levels, span.stop - span.start)


def in_one_place(model: SideModel, rows: Rows, ring: int = 8192) -> Rows:
    """Compute disclosed activations of pixel rows by the complete protocol, with a new key holder in this process.

    Unlike a client, the key holder here gets the last order, so that the states can be returned in the order of rows.

    Raises:
        InputError: the rows are not images, or there is only one row, for which there is no secret order.
    """
    if "pixel_values" not in rows.names:
        raise InputError("an encrypted forward pass takes images")
    if len(rows) == 1:
        raise InputError('1 row: with protocol = "permuted", a batch in a secret order needs at least 2')
    backbone, released, scales = model.frozen_parts
    matrices, kind, levels = fold(backbone.module), model.adaptation_spec.released, model.net.shape[0]
    holder = PermutedKeyHolder.new(len(matrices.positions), parameters_of(ring))
    public, ledger, secret = holder.public(), DistanceLedger(), os.urandom(32)
    done = [torch.zeros(0, *model.net.shape)]
    for number, span in enumerate(spans_by_part({"train": len(rows), "val": 0, "test": 0}, holder.layout.samples)):
        part = rows.take(range(span.start, span.stop)).compute()
        pixels, reasons = replace_unlike(part.tensors["pixel_values"], limits_of(backbone.module))
        x = matrices.patch(pixels).double().numpy()
        pi = permutations.draw_all(secret, "", number, levels, len(x))
        session, key, turned = os.urandom(16), os.urandom(32), list[Tensor]()
        holder.begin(session, key)

        def release(
            block: int, message: bytes, n: int = len(x), turned: list[Tensor] = turned, session: bytes = session
        ) -> bytes:
            if block == levels:
                holder.labels_of(message, n, 1)
                return b""
            states = holder.states_of(message, n)
            turned.append(torch.from_numpy(states.astype(np.float32)))
            return b"" if block + 1 == levels else holder.encrypt_states(session, states)

        owner = PermutedModelOwner(matrices, kind, public, session, key, ledger, orders=[order.numpy() for order in pi])
        sent = join_messages(holder.rows(x), holder.labels(session, np.zeros(len(x), np.int64), 1))
        owner.run(sent, holder.refresh, release)
        holder.end(session)
        came = torch.stack(permutations.to_last(turned, permutations.steps(pi)), 1)[torch.argsort(pi[-1])]
        fine = torch.tensor([not reason for reason in reasons])
        done.append(torch.where(fine[:, None, None, None], released(came / scales[:, None, None]), 0.0))
    return Rows({STATES: torch.cat(done)}, labels=rows.labels)
