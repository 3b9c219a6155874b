"""Messages of a secure aggregation with the train message, and the server's state between sums."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedfm.aggregation._secagg_keys import DEAD, OUT, Agreed
from fedfm.core.client import ClientId
from fedfm.core.wire import payload as wire
from fedfm.errors import E_SHAPE, ClientFault

AHEAD = 16  # sums for which keys are agreed


@dataclass(frozen=True)
class Sum:
    """The parameters of a sum in the train message.

    Attributes:
        number: of the sum since the agreement on keys.
        cohort: (n,) uint8, 1 at the positions of its members.
        size: P, numbers of a masked vector, also of a client without an update; 0: the size of the update.
    """

    number: int
    cohort: Tensor
    size: int = 0


@dataclass(frozen=True)
class Masked:
    """A client's reply to the train message.

    Attributes:
        seal: digest of the message to the client, and its signature of that and of the cohort, (96,) uint8.
        head: weight and weighted metrics, (1 + M,) int64, masked.
        body: weighted delta, (P,) int64 or int32, masked.
    """

    seal: Tensor
    head: Tensor
    body: Tensor


@dataclass
class Session:
    """The server's state of one agreement on keys.

    Attributes:
        shares_at: by member whose shares arrived, the positions of the clients with them, in the order of the shares.
        holds: by member that has shares of others, the positions of those, in the order in which it reveals.
        used: number of sums so far.
        broken: a client dropped out.
    """

    agreement: Agreed
    threshold: int
    shares_at: dict[int, list[int]]
    holds: dict[int, list[int]]
    used: int = 0
    broken: bool = False

    def serves(self, cohort: Collection[ClientId]) -> bool:
        """Whether these keys serve another sum, of this cohort."""
        ready = {self.agreement.names[p] for p in self.holds}
        return not self.broken and self.used < AHEAD and ready >= set(cohort)

    def askable(self, status: bytes) -> list[int]:
        """Positions of the clients to ask for unmasking: those with shares of the cohort that did not drop out."""
        return [p for p, held in self.holds.items() if status[p] != DEAD and any(status[o] != OUT for o in held)]


def bytes_check(*shape: int) -> Any:
    """A check that a reply is bytes of this shape."""

    def check(value: Tensor) -> None:
        if value.dtype != torch.uint8 or tuple(value.shape) != shape:
            raise ClientFault(E_SHAPE, f"{value.dtype} {tuple(value.shape)}, expected bytes {shape}")

    return check


def check_bytes(tensor: Tensor, *shape: int) -> Tensor:
    """Check that a payload is bytes of this shape."""
    bytes_check(*shape)(tensor)
    return tensor


def digest_of(payload: Any) -> bytes:
    """SHA-256 of the payload that is the same for all clients."""
    head, pieces = wire.encode(payload)
    found = hashlib.sha256(head.encode())
    for piece in pieces:
        found.update(piece)
    return found.digest()
