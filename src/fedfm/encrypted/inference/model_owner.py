"""Encrypted inference between a key holder, who has the rows, and a model owner, without any engine or federation.

*Protocol* (masked): the key holder sends encrypted rows. The model owner computes one block after another, asks the
holder to refresh masked ciphertexts, and sends the disclosed activations of every block. The rows and the secret key
stay with the holder, and the weights stay with the owner. Both sides are semi-honest.

*What the owner sends*: masked ciphertexts (:mod:`~fedfm.encrypted.ckks.refresh`; the ledger sums their statistical
distance), and disclosed activations. The owner adds two things to each ciphertext of disclosed activations: an
encryption of zero under the holder's public key, and uniform noise on every coefficient. The encryption of zero hides
the second polynomial, which would reveal a linear layer's weights exactly; this relies on ring learning with errors.
The noise gives **no** useful statistical distance. A precision of 1e-3 allows noise of 2^-14 per slot (rms), which is
about as large as the rounding of the computation; a distance of 2^-40 would need noise that is 2^40 times as large. So
a holder sees the disclosed values with this rounding. The rounding depends on the weights, as the values do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedfm.encrypted.ckks import encoding
from fedfm.encrypted.ckks.ciphertexts import Ciphertexts
from fedfm.encrypted.ckks.matrices import linear
from fedfm.encrypted.ckks.refresh import Masking, Spending
from fedfm.encrypted.ckks.remote_refresh import RemoteRefresh
from fedfm.encrypted.ckks.seal import ServerKeys
from fedfm.encrypted.ckks.slot_constants import plus_slots
from fedfm.encrypted.ckks.transformer_block import Packing
from fedfm.encrypted.ckks.wire import Channel
from fedfm.encrypted.inference import messages
from fedfm.encrypted.inference.folded_model import FoldedModel, block_of
from fedfm.encrypted.inference.key_holder import KeyHolder, OutOfRange
from fedfm.encrypted.inference.messages import RELEASE_LIMBS, Checkpoint
from fedfm.encrypted.inference.released_states import KINDS, Numbers, Released
from fedfm.encrypted.inference.select_states import select_released
from fedfm.errors import E_FORMAT, E_SHAPE, ClientFault, InputError
from fedfm.privacy.crypto import keys

__all__ = ["FLOOD", "Checkpoint", "KeyHolder", "ModelOwner", "OutOfRange"]

FLOOD = 2.0**-14  # rms of the noise in a disclosed slot


class ModelOwner:
    """The side that has the model, in one session with one key holder.

    Args:
        folded: the model.
        released: ``class``, ``grid`` or ``tokens``.
        public: the holder's evaluation keys.
        session: 16 bytes, new for this session.
        key: 32 bytes, agreed on with the holder.
        ledger: records the masks' statistical distance; all sessions with this holder share it.
        projection: (p, d), for ``released = "tokens"``.

    Raises:
        ClientFault: the keys are damaged, or are for other parameters or another number of tokens.
        InputError: the model cannot run encrypted, or does not allow this kind of disclosure.
    """

    def __init__(
        self,
        folded: FoldedModel,
        released: str,
        public: bytes,
        session: bytes,
        key: bytes,
        ledger: Spending,
        *,
        projection: Numbers | None = None,
    ) -> None:
        self.folded = folded
        tokens, features = folded.positions.shape
        parameters, found, rest = messages.parse_header(messages.PUBLIC, public)
        if found != tokens:
            raise ClientFault(E_SHAPE, f"the keys are for {found} tokens, but the model has {tokens}")
        self.layout = Packing(parameters, tokens)
        self.kind = Released(released, tokens, features, projection, folded.class_token)
        self._blocks = [block_of(layer, self.layout) for layer in folded.blocks]
        self._floor = messages.floor_of(parameters)
        try:
            self.keys = ServerKeys(parameters, rest, floor=self._floor)
        except InputError as error:
            raise ClientFault(E_FORMAT, str(error)) from None
        if not all(self.keys.can_rotate(r) for r in self.layout.rotations):
            raise ClientFault(E_FORMAT, "a rotation key is missing")
        self._channel = Channel(parameters, key, session, "server")
        self._masking = Masking(folded.bound, ledger)
        self.link: RemoteRefresh | None = None

    def run(
        self,
        rows: bytes,
        exchange: Callable[[bytes], bytes],
        release: Callable[[int, bytes], object],
        start: Checkpoint | None = None,
        save: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        """Compute all blocks of one batch.

        Args:
            rows: the message from :meth:`KeyHolder.rows`; ignored if there is a checkpoint.
            exchange: sends a refresh to the holder and returns its answer.
            release: sends the disclosed activations of a block; it is called for blocks 0, 1, ... in turn.
            start: the checkpoint of an earlier session of this batch.
            save: stores a checkpoint; it is called after the activations of the checkpoint's last block were sent.

        Raises:
            ClientFault: the holder's answer does not match the request.
            RunError: the run would exceed its statistical distance.
        """
        self.link = self.keys.refresh = RemoteRefresh(self._masking, self._channel, exchange)
        first = 0 if start is None else start.blocks
        x = self._embed(rows) if start is None else self._resume(start)
        for number in range(first, len(self._blocks)):
            x = self._blocks[number](x)
            x = x.at(min(self._floor, x.level + 1))
            release(number, self.release(number, x[: self._blocks[number].features]))
            if save is not None:
                save(Checkpoint(number + 1, x.scale, x.residues, self.layout.parameters))

    def release(self, block: int, x: Ciphertexts) -> bytes:
        """Make the message with the disclosed activations of a block, from its encrypted states (d,)."""
        largest = float(self.folded.ranges[block] / self.folded.scales[block]) * self.kind.gain()
        x, over = x.at(RELEASE_LIMBS), float(self.folded.scales[block])
        chosen = select_released(x, self.kind, self.layout, over, largest)
        return self._clean(chosen, messages.NOTE.pack(KINDS.index(self.kind.kind), block, self.kind.width, largest))

    def _clean(self, chosen: Ciphertexts, note: bytes) -> bytes:
        """Add an encryption of zero and noise to ciphertexts for the holder; return them as a message."""
        out = chosen.residues.copy()
        ring = self.keys.ring
        out = ring.add(out, self.keys.zeros(len(out), out.shape[2]))
        out[:, 0] = ring.add(np.ascontiguousarray(out[:, 0]), self._noise(len(out), chosen.scale))
        return self._channel.pack(out, chosen.scale, note=note)

    def _embed(self, rows: bytes) -> Ciphertexts:
        """Embed encrypted tokens, including their positions; texts come embedded, with the mask of their places."""
        parameters, folded = self.layout.parameters, self.folded
        limbs = messages.rows_limbs(parameters)
        residues, scale = self._channel.unpack(
            rows, limbs=limbs, count=folded.embedding.shape[1], scale=parameters.scale
        )
        x = Ciphertexts(residues.view(np.uint64), scale, self.keys)
        if self._blocks[0].has_mask:
            return x
        added = self.layout.pack((folded.positions + folded.bias)[None])
        return plus_slots(linear(folded.embedding, x), added)

    def _resume(self, start: Checkpoint) -> Ciphertexts:
        parameters, features = self.layout.parameters, self._blocks[0].inputs
        if start.parameters != parameters or len(start.residues) != features or start.blocks > len(self._blocks):
            raise InputError("the checkpoint belongs to another model or to other encryption parameters")
        return Ciphertexts(start.residues.view(np.uint64), start.scale, self.keys)

    def _noise(self, count: int, scale: float) -> NDArray[np.int64]:
        """Draw uniform random coefficients in evaluation form (count, 1, N); the slots have the rms :data:`FLOOD`."""
        parameters = self.layout.parameters
        reach = FLOOD * scale * math.sqrt(3 / parameters.degree)
        bits = max(1, round(math.log2(reach)) + 1)  # for uniform integers in [-2^(bits - 1), 2^(bits - 1))
        words = np.frombuffer(keys.entropy(8 * count * parameters.degree), "<u8") & np.uint64((1 << bits) - 1)
        noise = words.astype(np.int64).reshape(count, -1) - (1 << (bits - 1))
        return encoding.to_residues(noise, RELEASE_LIMBS - 1, self.keys.ring)
