"""A finished run's model as a task predicts with it, and the scores that a task gives."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Rows
    from fedfm.models.network import Network

Scores = dict[str, Any]


class Trained(Protocol):
    """A finished run's model, to predict with."""

    @property
    def model(self) -> Network:
        """The model."""

    def encode(self, rows: Rows) -> Rows:
        """The rows as the method's head takes them."""

    def logits(self, rows: Rows) -> Tensor:
        """Logits of all rows, float32 on the CPU, as the method predicts."""

    def apply(self, rows: Rows) -> AbstractContextManager[Rows]:
        """Within the context the model has the trained weights; the rows have what the method adds to them."""
