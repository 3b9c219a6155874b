"""The protocol of a finished run's model, with which a task predicts; and the type of scores."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from fedfm.core.rows import Rows
    from fedfm.models.network import Network

Scores = dict[str, Any]


class Trained(Protocol):
    """A finished run's model, with which a task predicts."""

    @property
    def model(self) -> Network:
        """The model."""

    def encode(self, rows: Rows) -> Rows:
        """The rows in the form that the method's head reads."""

    def logits(self, rows: Rows) -> Tensor:
        """Logits of all rows, float32 on the CPU, as the method predicts."""

    def apply(self, rows: Rows) -> AbstractContextManager[Rows]:
        """Context manager: the model has the trained weights; yields the rows with the tensors that the method adds."""
