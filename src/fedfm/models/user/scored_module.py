"""The part of a user's module that its scoring functions use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from fedfm.core.rows import Batch
    from fedfm.models.user.trainer_arguments import TrainersModule


class ScoredModule(Protocol):
    """The members of :class:`fedfm.models.user.user_module.Given` that scoring needs. That class documents them."""

    module: nn.Module
    trainer: Any
    of_trainer: TrainersModule | None

    def at_once(self, most: int) -> int:
        """The number of rows of a batch: ``most``, or less if a Trainer's setting limits it."""

    def native(self, batch: Batch) -> Any:
        """The batch in the form of the user's collate function."""

    def outcome(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The loss and the outputs of a batch."""
