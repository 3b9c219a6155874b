"""The protocol of a model, as tasks and measurements use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows

if TYPE_CHECKING:
    import numpy as np

    from fedfm.core.task_facts import TaskFacts
    from fedfm.data.table import Table
    from fedfm.models.families import Parts
    from fedfm.models.preprocessors import Tools
    from fedfm.models.spec import ModelSpec

Pool = Callable[[Tensor, Batch, int | None], Tensor]  # states (b, T, d), their batch, the padding token -> (b, d)


class Network(Protocol):
    """A foundation model that computes outputs; :class:`fedfm.models.model.Model` documents its members."""

    spec: ModelSpec
    classes: tuple[str, ...]
    module: nn.Module
    parts: Parts
    tools: Tools
    head: nn.Linear | None
    pool: Pool | None
    share: Tensor | None
    answers_alone: bool | None

    @property
    def task(self) -> TaskFacts:
        """The task of the model."""

    @property
    def device(self) -> torch.device:
        """The module's device."""

    @property
    def last_layer(self) -> nn.Linear | None:
        """The head, or the output layer of a language model."""

    @property
    def is_language_model(self) -> bool:
        """Whether its rows are tokens without labels."""

    def prepare(self, table: Table, index: Sequence[int] | np.ndarray, most: float | None = None) -> Rows:
        """Rows of the table as tensors or tokens of this model."""

    def logits(self, batch: Batch) -> Tensor:
        """Logits of a batch of rows."""

    def outputs(self, batch: Batch) -> Tensor:
        """The module's logits of a batch."""

    def flat(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (m, C) and targets (m,) of the cross-entropy."""

    def count_targets(self, batch: Batch) -> int:
        """The number of targets in the mean loss of this batch."""

    def predict(self, rows: Rows, batch_size: int = 64) -> Tensor:
        """Logits of all rows."""

    def in_batches(self, rows: Rows, batch_size: int = 64) -> Tensor:
        """Logits of all rows; rows of similar length share a batch."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Context manager: evaluation mode without gradients."""
