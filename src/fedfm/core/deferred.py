"""Rows of a model's argument that are computed only when a batch needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor


class Deferred(Protocol):
    """n rows of a model's argument, computed when a batch needs them; a row's bits depend only on that row.

    Attributes:
        loaders: number of processes that compute batches in advance; it may be 0.
    """

    @property
    def loaders(self) -> int: ...

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> Deferred:
        """Select rows in this order, without computing them."""
        ...

    def sources(self) -> Iterator[bytes]:
        """The bytes from which each row is computed."""
        ...

    def compute(self) -> Tensor:
        """The rows (n, ...)."""
        ...
