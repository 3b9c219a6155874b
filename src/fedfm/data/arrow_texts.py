"""Sequences of texts and images whose values stay in an Arrow column (perhaps memory-mapped) until they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np

from fedfm.data.pictures import Pictured

_READ = 4096  # number of texts that are read at a time


class ArrowTexts(Sequence[str]):
    """A sequence of strings from a pyarrow ChunkedArray, in the order of an index.

    Args:
        column: N strings; a missing string is null.
        index: (n,) positions in the column; None selects all N.
    """

    def __init__(self, column: Any, index: np.ndarray | None = None) -> None:
        self._column, self._index = column, index

    def __len__(self) -> int:
        return len(self._column if self._index is None else self._index)

    def __getitem__(self, i: Any) -> Any:
        if not isinstance(i, slice):
            if not -len(self) <= i < len(self):
                raise IndexError(i)
            i = int(i) % len(self)
            return self._column[i if self._index is None else int(self._index[i])].as_py()
        start, stop, step = i.indices(len(self))
        if self._index is None and step == 1:
            return self._column.slice(start, max(stop - start, 0)).to_pylist()
        return self.take(np.arange(start, stop, step)).to_list()

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _READ):
            yield from self[start : start + _READ]

    def take(self, index: np.ndarray) -> Self:
        """Select rows in this order, without a copy."""
        return type(self)(self._column, index if self._index is None else self._index[index])

    def to_list(self) -> list[str]:
        """All rows as a list."""
        column = self._column if self._index is None else self._column.take(self._index)
        found: list[str] = column.to_pylist()
        return found


class ArrowPictures(ArrowTexts, Pictured):
    """A sequence of encoded images (bytes) from a pyarrow ChunkedArray."""

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))  # one at a time, since an image may take megabytes

    def join(self, others: Sequence[ArrowPictures]) -> ArrowPictures:
        """Concatenate these images and others without a copy. No part may have an index."""
        import pyarrow

        chunks = [chunk for part in (self, *others) for chunk in part._column.chunks]
        return ArrowPictures(pyarrow.chunked_array(chunks, self._column.type))
