"""Rows of an argument of a model that are computed when a batch needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from torch import Tensor


class Deferred(Protocol):
    """n rows of an argument of the model that are computed when a batch needs them; a row's bits depend on it alone.

    Attributes:
        loaders: processes that compute batches ahead; 0: none.
    """

    @property
    def loaders(self) -> int: ...

    def __len__(self) -> int: ...

    def take(self, index: np.ndarray) -> Deferred:
        """These rows, in this order; none is computed."""
        ...

    def sources(self) -> Iterator[bytes]:
        """The bytes of which each row is computed."""
        ...

    def compute(self) -> Tensor:
        """The rows (n, ...)."""
        ...
