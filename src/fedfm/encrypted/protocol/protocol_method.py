"""The method as its protocols see it: its settings, and the client halves that protocols call."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fedfm.core.client import Client
from fedfm.encrypted.protocol.handshake import Hello, Opened


class ProtocolMethod(Protocol):
    """The members of :class:`fedfm.encrypted.blindfed.BlindFed` that protocols use; they are explained there."""

    @property
    def foundation(self) -> str:
        """Name or folder of the frozen model."""

    @property
    def labels(self) -> str:
        """``permuted`` if the server returns the labels in its own order; ``loss_only`` if it returns only the loss."""

    @property
    def processes(self) -> int:
        """Number of worker processes of the server's encrypted computation."""

    @property
    def ring(self) -> int:
        """Degree of the ciphertexts' ring."""

    def open(self, client: Client, hello: Hello) -> Opened:
        """See step 1 in :class:`BlindFed`."""

    def rows(self, client: Client, batch: int, session: Tensor | None = None, go_on: bool = False) -> Tensor:
        """See step 2."""

    def refresh(self, client: Client, message: Tensor) -> Tensor:
        """See step 3."""

    def keep(self, client: Client, batch: int, block: int, states: Tensor) -> int:
        """See step 4."""

    def labelled(
        self, client: Client, batch: int, session: Tensor | None = None, go_on: bool = False
    ) -> dict[str, Tensor]:
        """Permuted, step 1."""

    def turn(self, client: Client, batch: int, block: int, states: Tensor) -> Tensor:
        """Permuted, step 3."""

    def align(self, client: Client, batch: int, orders: Tensor, labels: Tensor) -> int:
        """Permuted, steps 4 and 6."""
