"""What a secure aggregation sends with the train message, and what its server keeps between sums."""

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
    """What the train message says of the sum.

    Attributes:
        number: since keys were agreed.
        cohort: (n,) uint8, 1 at the positions of those who take part.
        size: P, numbers of a masked vector, whatever becomes of the client's update; 0: those of the update.
    """

    number: int
    cohort: Tensor
    size: int = 0


@dataclass(frozen=True)
class Masked:
    """A client's reply to the train message.

    Attributes:
        seal: digest of what the client was sent, and its signature of that and of the cohort, (96,) uint8.
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
        held: of each member whose shares came, the positions of those who hold them, in the order of the shares.
        holds: of each member that holds shares of others, the positions of those, in the order in which it reveals.
        used: number of sums so far.
        broken: somebody dropped out.
    """

    agreed: Agreed
    threshold: int
    held: dict[int, list[int]]
    holds: dict[int, list[int]]
    used: int = 0
    broken: bool = False

    def serves(self, cohort: Collection[ClientId]) -> bool:
        """Whether these keys serve another sum, of this cohort."""
        ready = {self.agreed.names[p] for p in self.holds}
        return not self.broken and self.used < AHEAD and ready >= set(cohort)

    def askable(self, status: bytes) -> list[int]:
        """Who is asked to unmask: holders of shares of the cohort, unless they dropped out."""
        return [p for p, held in self.holds.items() if status[p] != DEAD and any(status[o] != OUT for o in held)]


def bytes_check(*shape: int) -> Any:
    """Check of a reply: bytes of this shape."""

    def check(value: Tensor) -> None:
        if value.dtype != torch.uint8 or tuple(value.shape) != shape:
            raise ClientFault(E_SHAPE, f"{value.dtype} {tuple(value.shape)}, expected bytes {shape}")

    return check


def check_bytes(tensor: Tensor, *shape: int) -> Tensor:
    """Check a payload: bytes of this shape."""
    bytes_check(*shape)(tensor)
    return tensor


def digest_of(shown: Any) -> bytes:
    """SHA-256 of what the server sent to all clients alike."""
    head, pieces = wire.encode(shown)
    found = hashlib.sha256(head.encode())
    for piece in pieces:
        found.update(piece)
    return found.digest()
