"""Images of a table that are decoded and prepared batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.data.pixels import rgb_of
from fedfm.linalg.out_of_core import limit

CHUNK = 256  # number of images decoded at a time
AT_ONCE = 1 << 30  # bytes: a client's prepared images stay in memory up to this size, or limit() / 4 if that is less

Preprocess = Callable[[list[Any]], Tensor]  # PIL images -> (n, 3, H, W)


@dataclass(frozen=True)
class Pictures:
    """Some of a table's images; see :class:`fedfm.core.rows.Deferred`.

    Attributes:
        inputs: the table's inputs: uint8 (N, H, W, C), or N paths or encoded images.
        index: (n,) indexes of these images in the table.
        preprocess: the model's preprocessing.
        loaders: number of processes that compute batches in advance.
    """

    inputs: Any
    index: np.ndarray
    preprocess: Preprocess
    loaders: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray) -> Pictures:
        """These rows, in this order."""
        return replace(self, index=self.index[index])

    def compute(self) -> Tensor:
        """The prepared images, float32 (n, 3, H', W')."""
        return pixels(Chosen(self.inputs, self.index), self.preprocess)

    def sources(self) -> Iterator[bytes]:
        """The stored bytes of each image, or its pixels with their shape."""
        for item in Chosen(self.inputs, self.index):
            if isinstance(item, bytes):
                yield item
            elif isinstance(item, str | Path):
                yield Path(item).read_bytes()
            else:
                pixels = np.ascontiguousarray(item)
                yield f"{pixels.dtype.str}{pixels.shape}".encode() + pixels.tobytes()

    def exceed(self, most: float | None) -> bool:
        """Whether the prepared images take more than ``most`` bytes; None stands for :func:`room`."""
        if len(self) < 2 or most == math.inf:
            return False
        return self.take(np.array([0])).compute().nbytes * len(self) > (room() if most is None else most)


def room() -> int:
    """Largest number of bytes of a client's prepared rows in memory; if they take more, each batch prepares its own."""
    return min(AT_ONCE, limit() // 4)


class Chosen(Sequence[Any]):
    """Items of a sequence, in the order of an index; none is copied."""

    def __init__(self, items: Any, index: np.ndarray) -> None:
        self._items, self._index = items, index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Chosen(self._items, self._index[i])
        return self._items[int(self._index[i])]


def pixels(pictures: Any, preprocess: Preprocess) -> Tensor:
    """uint8 (N, H, W, C) or N paths -> float32 (N, 3, H', W'); opens one chunk of paths at a time."""
    out, at = torch.zeros(0, 3, 1, 1), 0
    for chunk in _rgb_chunks(pictures):
        done = preprocess(chunk)
        if len(done) == len(pictures):
            return done
        if not at:
            out = torch.empty(len(pictures), *done.shape[1:], dtype=done.dtype)
        out[at : at + len(done)] = done
        at += len(done)
    return out


def _rgb_chunks(pictures: Any) -> Iterator[list[Any]]:
    """Chunks of RGB images."""
    for start in range(0, len(pictures), CHUNK):
        yield [_rgb(x) for x in pictures[start : start + CHUNK]]


def _rgb(item: Any) -> Any:
    """The item as an RGB image, in the form of :func:`fedfm.data.pictures.rgb`."""
    if isinstance(item, np.ndarray):
        return rgb_of(item)
    from fedfm.data.pictures import rgb

    return rgb(item)
