"""The train message of secure aggregation, the reply, the server's state between sums, and the removal of masks."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfm.aggregation._secagg_keys import DEAD, KEY, OUT, Agreed, bytes_of, fingerprint, pair_mask, self_mask
from fedfm.core.client import ClientId
from fedfm.core.wire import payload as wire
from fedfm.errors import E_SHAPE, ClientFault, RunError
from fedfm.privacy.crypto import keys, masks, shamir

AHEAD = 16  # number of sums for which clients agree on keys


@dataclass(frozen=True)
class Sum:
    """The parameters of a sum in the train message.

    Attributes:
        number: number of the sum since the agreement on keys.
        cohort: (n,) uint8, 1 at the positions of the cohort's members.
        size: P, the length of the masked vector, which a client without an update also needs; 0: the update's length.
    """

    number: int
    cohort: Tensor
    size: int = 0


@dataclass(frozen=True)
class Masked:
    """A client's reply to the train message.

    Attributes:
        seal: digest of the message to the client, and the client's signature of this digest and the cohort, (96,)
            uint8.
        head: masked weight and weighted metrics, (1 + M,) int64.
        body: masked weighted delta, (P,) int64 or int32.
    """

    seal: Tensor
    head: Tensor
    body: Tensor


@dataclass
class Session:
    """The server's state for one agreement on keys.

    Attributes:
        shares_at: for each member whose shares arrived, the positions of the clients that have them, in the shares'
            order.
        holds: for each member that keeps seed shares, the positions of the seeds' owners, in the order of its shares.
        used: number of sums so far.
        broken: whether a client dropped out.
    """

    agreement: Agreed
    threshold: int
    shares_at: dict[int, list[int]]
    holds: dict[int, list[int]]
    used: int = 0
    broken: bool = False

    def serves(self, cohort: Collection[ClientId]) -> bool:
        """Whether these keys can serve another sum, with this cohort."""
        ready = {self.agreement.names[p] for p in self.holds}
        return not self.broken and self.used < AHEAD and ready >= set(cohort)

    def askable(self, status: bytes) -> list[int]:
        """Positions of the clients to ask for unmasking: they have shares of the cohort, and did not drop out."""
        return [p for p, held in self.holds.items() if status[p] != DEAD and any(status[o] != OUT for o in held)]


def remove_masks(
    number: int,
    session: Session,
    i: int,
    status: bytes,
    seals: Mapping[int, bytes],
    revealed: Mapping[int, Tensor],
    vectors: Sequence[masks.Words],
) -> None:
    """Subtract from the sum the survivors' own masks, and their pair masks with members that dropped out.

    Args:
        number: number of the round, for error messages.
        i: number of the sum since the agreement on keys.
        status: OUT, DEAD or ALIVE for each position.
        seals: the seal of each survivor, by the survivor's position.
        revealed: the shares that each client reveals, by the client's position.
        vectors: head and body of the sum, changed in place.

    Raises:
        RunError: shares are missing or wrong.
    """
    agreement, cohort = session.agreement, {p for p, s in enumerate(status) if s != OUT}
    rows = {h: {o: k for k, o in enumerate(o for o in session.holds[h] if o in cohort)} for h in revealed}
    context = {p: agreement.context(i, bytes(s != OUT for s in status), seal[:KEY]) for p, seal in seals.items()}
    for p in sorted(cohort):
        name, card = agreement.names[p], agreement.card(p)
        partners = [] if p in seals else [o for o in agreement.around(p, cohort) if o in seals]
        if p not in seals and not partners:
            continue
        shares = {
            x: int.from_bytes(bytes_of(revealed[h][rows[h][p]]), "little")
            for x, h in enumerate(session.shares_at[p], 1)
            if p in rows.get(h, ())
        }
        try:
            seed = shamir.combine(shares, session.threshold).to_bytes(KEY, "little")
        except ValueError as error:
            raise RunError(f"round {number}: the masks of {name} stay in the sum: {error}") from None
        right = fingerprint(seed) == card.self_fingerprint(i)
        if not (right if p in seals else keys.public_of(seed) == card.pair(i)):
            raise RunError(f"round {number}: the masks of {name} stay in the sum: a share is wrong")
        if p in seals:
            masks.add(vectors, self_mask(seed, context[p]), negative=True)
        for o in partners:
            other = agreement.names[o]
            key = pair_mask(seed, agreement.card(o).pair(i), context[o], (name, other))
            masks.add(vectors, key, negative=other < name)  # a survivor whose name comes first has added this mask


def bytes_check(*shape: int) -> Any:
    """A function that refuses every value except a uint8 tensor of this shape."""

    def check(value: Tensor) -> None:
        if value.dtype != torch.uint8 or tuple(value.shape) != shape:
            raise ClientFault(E_SHAPE, f"{value.dtype} {tuple(value.shape)}, expected bytes of shape {shape}")

    return check


def check_bytes(tensor: Tensor, *shape: int) -> Tensor:
    """Check that an entry of a payload is a uint8 tensor of this shape, and return it."""
    bytes_check(*shape)(tensor)
    return tensor


def digest_of(payload: Any) -> bytes:
    """SHA-256 of the part of the payload that is the same for all clients."""
    head, pieces = wire.encode(payload)
    found = hashlib.sha256(head.encode())
    for piece in pieces:
        found.update(piece)
    return found.digest()
