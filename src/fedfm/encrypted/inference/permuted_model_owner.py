"""The model owner's half of the "permuted" protocol, the protocol of BlindFed's paper.

After block l, the key holder gets E(B_l) Pi_l: the states of all tokens, with the samples in a secret order. It returns
fresh encryptions of these states in the same order, with all primes; this replaces the refresh between two blocks. A
block computes each sample separately. So the owner continues in the order Pi_l, and reorders the next states from Pi_l
to Pi_{l+1}. No order is ever undone. The holder sent its encrypted labels in its own order. At the end the owner
returns them in the order Pi_{L+1}.

The owner adds an encryption of zero and noise to all states and labels that it sends, as it does to disclosed
activations (:mod:`~fedfm.encrypted.inference.model_owner`). The noise comes back with the states, so errors of later
blocks are slightly larger.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedfm.encrypted.ckks import slot_permutation
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh
from fedfm.encrypted.ckks.slot_permutation import Order, masks, pair_features, permute_samples, weighing
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.messages import RELEASE_LIMBS, Checkpoint
from fedfm.encrypted.inference.model_owner import ModelOwner
from fedfm.encrypted.inference.select_states import plain_factor
from fedfm.errors import E_FORMAT, ClientFault, InputError


class PermutedModelOwner(ModelOwner):
    """A :class:`~fedfm.encrypted.inference.model_owner.ModelOwner` of the "permuted" protocol, for one batch only.

    Args:
        orders: Pi_1 ... Pi_{L+1}, each (n,): sample order[j], counted in the holder's own order, is at position j.

    Raises:
        ClientFault: the keys are damaged, are for other parameters, or are incomplete.
        InputError: the model cannot run encrypted, or the number of orders is wrong.
    """

    def __init__(self, *about: Any, orders: Sequence[Order]) -> None:
        super().__init__(*about)
        if len(orders) != len(self._blocks) + 1:
            raise InputError(
                f"{len(orders)} orders for {len(self._blocks)} blocks; expected one order more than blocks"
            )
        self.orders = [np.asarray(order) for order in orders]
        if not all(self.keys.can_rotate(r) for r in slot_permutation.rotations(self.layout)):
            raise ClientFault(E_FORMAT, "a rotation key is missing")

    def run(
        self,
        rows: bytes,
        exchange: Callable[[bytes], bytes],
        release: Callable[[int, bytes], Any],
        start: Checkpoint | None = None,
        save: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        """Compute all blocks of one batch.

        Args:
            rows: messages from :meth:`PermutedKeyHolder.rows` and :meth:`~PermutedKeyHolder.labels`, joined by
                :func:`join_messages`. If there is a checkpoint, the message of rows is empty.
            exchange: sends a refresh to the holder and returns its answer.
            release: sends the states of blocks 0, 1, ... and returns the holder's fresh encryptions of these states;
                after the last block, the returned value is ignored. A call with block L sends the labels.
            start: the checkpoint of an earlier session of this batch.
            save: stores a checkpoint; it is called after every block except the last.

        Raises:
            ClientFault: the holder's answer does not match the request.
            RunError: the run would exceed its statistical distance.
        """
        self.link = self.keys.refresh = RemoteRefresh(self._masking, self._channel, exchange)
        first, own = 0 if start is None else start.blocks, np.arange(len(self.orders[0]))
        sent, labels = split_messages(rows)
        x = self._embed(sent) if start is None else self._resume(start)
        residues, scale = self._channel.unpack(labels, limbs=RELEASE_LIMBS, scale=self.layout.parameters.scale)
        known = Ciphertexts(residues.view(np.uint64), scale, self.keys)
        before, last = own if start is None else self.orders[first - 1], len(self._blocks) - 1
        for number in range(first, last + 1):
            x = self._blocks[number](x)
            answer = release(number, self.permute(number, x, np.argsort(before)[self.orders[number]]))
            before = self.orders[number]
            if number < last:
                x = self._receive_states(answer)
                if save is not None:
                    save(Checkpoint(number + 1, x.scale, x.residues, self.layout.parameters))
        release(last + 1, self.permute(last + 1, known, self.orders[-1]))

    def permute(self, block: int, x: Ciphertexts, order: Order) -> bytes:
        """Make the message with the reordered states of a block, from its encrypted states (d,).

        For block L, ``x`` has the encrypted labels in place of states.
        """
        states = block < len(self._blocks)
        largest = float(self.folded.ranges[block]) if states else 1.0
        x = x.at(RELEASE_LIMBS)
        factor = plain_factor(x, largest * slot_permutation.TOGETHER)
        plains = masks(order, self.layout, RELEASE_LIMBS, factor, self.keys.ring)
        found = permute_samples(pair_features(x), len(order), self.layout, weighing(plains, factor, self.keys))
        kind = messages.PERMUTED_STATES if states else messages.LABELS
        return self._clean(self.keys.rescale(found), messages.NOTE.pack(kind, block, len(x), largest))

    def _receive_states(self, answer: bytes) -> Ciphertexts:
        """Unpack the holder's fresh encryptions of states."""
        parameters, features = self.layout.parameters, self.folded.positions.shape[1]
        residues, scale = self._channel.unpack(answer, limbs=parameters.limbs, count=features, scale=parameters.scale)
        return Ciphertexts(residues.view(np.uint64), scale, self.keys)


def order_bytes(orders: Sequence[Order]) -> bytes:
    """Serialise orders for the worker processes; :func:`orders_of` is the inverse."""
    return len(orders).to_bytes(8, "little") + np.stack(orders).astype("<i8").tobytes()


def orders_of(data: bytes) -> list[Order]:
    """Load the orders Pi_1 ... Pi_{L+1} from the bytes of :func:`order_bytes`."""
    return list(np.frombuffer(data, "<i8", -1, 8).reshape(int.from_bytes(data[:8], "little"), -1))


def join_messages(rows: bytes, labels: bytes) -> bytes:
    """Join two messages into one; :func:`split_messages` is the inverse."""
    return len(rows).to_bytes(8, "little") + rows + labels


def split_messages(message: bytes) -> tuple[bytes, bytes]:
    """Split the result of :func:`join_messages` into the messages of rows and of labels."""
    end = 8 + int.from_bytes(message[:8], "little")
    return message[8:end], message[end:]
