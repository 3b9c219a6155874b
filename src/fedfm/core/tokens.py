"""Token-id vectors of unequal length in one flat array.

A tensor object for each row costs kilobytes; here a token costs 4 bytes and a row 16 more. Selected rows share the
array, which may be a memory-mapped file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import torch
from torch import Tensor


class Tokens(Sequence[Tensor]):
    """n token-id vectors: row i is ``flat[start[i] : start[i] + length[i]]``.

    Attributes:
        flat: int32 (T,), all tokens.
        start: int64 (n,).
        length: int64 (n,).

    Example:
        >>> tokens = Tokens.of([[5, 6, 7], [8]])
        >>> tokens[1], tokens.take([1, 0]).to_padded(0).tolist()
        (tensor([8]), [[8, 0, 0], [5, 6, 7]])
    """

    def __init__(self, flat: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        self.flat, self.start, self.length = flat, start, length

    @classmethod
    def one_after_the_other(cls, flat: np.ndarray, length: np.ndarray) -> Tokens:
        """Rows of these lengths (n,) that fill ``flat`` from its beginning."""
        length = np.asarray(length, dtype=np.int64)
        return cls(flat, np.cumsum(length) - length, length)

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | Tensor]) -> Tokens:
        """Copy these rows.

        Raises:
            ValueError: a token does not fit into int32.
        """
        return cls.gather([list(rows)])

    @classmethod
    def gather(cls, chunks: Iterable[Sequence[Sequence[int] | Tensor]]) -> Tokens:
        """Copy the rows of all chunks; only one chunk at a time is in memory as lists.

        Raises:
            ValueError: a token does not fit into int32.
        """
        flats, lengths = [np.zeros(0, dtype=np.int32)], [np.zeros(0, dtype=np.int64)]
        for chunk in chunks:
            lengths.append(np.fromiter(map(len, chunk), dtype=np.int64, count=len(chunk)))
            if len(chunk) and isinstance(chunk[0], Tensor):
                wide = torch.cat([torch.as_tensor(row) for row in chunk]).cpu().numpy()
            else:
                wide = np.fromiter(itertools.chain.from_iterable(chunk), dtype=np.int64, count=int(lengths[-1].sum()))
            flats.append(wide.astype(np.int32))
            if (flats[-1] != wide).any():
                raise ValueError(f"token {int(wide[flats[-1] != wide][0])} does not fit into 32 bits")
        return cls.one_after_the_other(np.concatenate(flats), np.concatenate(lengths))

    @classmethod
    def joining(cls, parts: Sequence[Tokens]) -> Tokens:
        """The rows of all parts, in order, copied."""
        flat = np.concatenate([part.concatenate().int().numpy() for part in parts])
        return cls.one_after_the_other(flat, np.concatenate([part.length for part in parts]))

    def __len__(self) -> int:
        return len(self.length)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> Tokens: ...
    def __getitem__(self, i: int | slice) -> Tensor | Tokens:
        if isinstance(i, slice):
            return Tokens(self.flat, self.start[i], self.length[i])
        at, n = int(self.start[i]), int(self.length[i])
        return torch.from_numpy(self.flat[at : at + n].astype(np.int64))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of these rows, not counting other rows of the array."""
        return 4 * int(self.length.sum()) + self.start.nbytes + self.length.nbytes

    def take(self, index: Sequence[int] | np.ndarray) -> Tokens:
        """These rows, in this order; tokens are not copied."""
        index = np.asarray(index, dtype=np.int64)
        return Tokens(self.flat, self.start[index], self.length[index])

    def cut(self, length: Sequence[int] | np.ndarray) -> Tokens:
        """The first ``length[i]`` tokens of each row, or all if it has fewer."""
        return Tokens(self.flat, self.start, np.minimum(self.length, np.asarray(length, dtype=np.int64)))

    def concatenate(self) -> Tensor:
        """All rows one after the other, int64 (sum of the lengths,)."""
        first = np.repeat(self.start - (np.cumsum(self.length) - self.length), self.length)
        return torch.from_numpy(self.flat[first + np.arange(len(first))].astype(np.int64))

    def to_padded(self, pad: int) -> Tensor:
        """The rows as one tensor, int64 (n, longest), with ``pad`` after each row."""
        inside = torch.from_numpy(np.arange(self.length.max(initial=0)) < self.length[:, None])
        out = torch.full(inside.shape, pad, dtype=torch.int64)
        out[inside] = self.concatenate()
        return out
