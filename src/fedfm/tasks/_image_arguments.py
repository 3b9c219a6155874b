"""The arguments that give a model the images of its rows. Rows differ in the number and size of their images.

For one row, a processor returns a tensor (k, ...) for each argument, such as k images or k patches. For a batch, it
pads the other axes with zeros to the largest size, and concatenates the rows along the first axis. :func:`join` does
the same, and :func:`check` compares the two once for each processor. In a batch of fedfm the first axis is that of
the rows, as in all batches: rows are padded to the largest size, and a tensor ``NAME.shape`` has each row's own shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fedfm.errors import InputError, first_line
from fedfm.models.images import room
from fedfm.models.quiet import quiet

if TYPE_CHECKING:
    from fedfm.core.attachments import Attachment
    from fedfm.core.rows import Batch

SHAPE = ".shape"
_SIZES = ((60, 40), (40, 80), (50, 50))  # widths and heights of the images with which a processor is checked
_checked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


@dataclass
class Source:
    """The images of n rows.

    Attributes:
        files: the images of each row.
        processor: the model's processor.
        values: the arguments of each row; None if they need too much memory, so that each batch computes its own.
    """

    files: Sequence[tuple[Attachment, ...]]
    processor: Any
    values: Sequence[dict[str, Tensor]] | None
    _last: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def of(self, index: Sequence[int]) -> list[dict[str, Tensor]]:
        """The arguments of these rows. The last result is kept, so that a batch computes all its arguments once."""
        if self.values is not None:
            return [self.values[i] for i in index]
        self._last = {i: self._last[i] if i in self._last else self._compute(i) for i in index}
        return [self._last[i] for i in index]

    def _compute(self, i: int) -> dict[str, Tensor]:
        from fedfm.data.pictures import rgb

        return arguments(self.processor, [rgb(file.source) for file in self.files[i]])


@dataclass(frozen=True)
class DeferredArgument:
    """One argument of some rows, computed when a batch needs it; see :class:`fedfm.core.deferred.Deferred`."""

    name: str
    source: Source
    index: np.ndarray
    axes: int  # number of axes of a row's tensor
    loaders: int = 0

    def __len__(self) -> int:
        return len(self.index)

    def take(self, index: np.ndarray) -> DeferredArgument:
        """These rows, in this order."""
        return DeferredArgument(self.name, self.source, self.index[index], self.axes, self.loaders)

    def sources(self) -> Iterator[bytes]:
        """For each row, the SHA-256 hashes of its images."""
        for i in self.index:
            yield b"".join(bytes.fromhex(file.sha256) for file in self.source.files[i])

    def compute(self) -> Tensor:
        """The rows (n, k, ...), padded with zeros."""
        found = [of.get(self.name) for of in self.source.of(self.index.tolist())]
        empty = torch.zeros((0,) * self.axes)
        return _stack([empty if x is None else x for x in found])


def of_rows(
    processor: Any, files: Sequence[tuple[Attachment, ...]], values: Iterable[dict[str, Tensor]]
) -> tuple[dict[str, DeferredArgument], dict[str, Tensor]]:
    """The arguments for rows with these images, and for each argument a tensor (n, axes) with the rows' shapes.

    Args:
        values: each row's arguments; if they take at most 1 GB and a quarter of the memory limit, they stay in memory.
    """
    kept: list[dict[str, Tensor]] | None = []
    seen: list[dict[str, tuple[int, ...]]] = []
    size, most = 0, room()
    for of in values:
        seen.append({name: tuple(x.shape) for name, x in of.items()})
        size += sum(x.nbytes for x in of.values())
        if kept is not None:
            kept.append(of)
        kept = kept if size <= most else None
    source, index = Source(files, processor, kept), np.arange(len(files))
    axes = {name: len(shape) for shapes in seen for name, shape in shapes.items()}
    shapes = {
        name + SHAPE: torch.tensor([row.get(name, (0,) * count) for row in seen], dtype=torch.int64).reshape(-1, count)
        for name, count in axes.items()
    }
    return {name: DeferredArgument(name, source, index, count) for name, count in axes.items()}, shapes


def for_model(batch: Batch, takes: Collection[str] | None = None) -> Batch:
    """The batch as the model's forward pass expects it: the images of all rows one after the other.

    Args:
        takes: names of the arguments of the forward pass; if None, they are not checked.

    Raises:
        InputError: the processor gives an argument that the forward pass does not take.
    """
    names = [name.removesuffix(SHAPE) for name in batch if name.endswith(SHAPE)]
    if takes is not None and (lost := [name for name in names if name not in takes]):
        raise InputError(
            f"model.name: the processor gives {', '.join(lost)}, which the model does not take: do both fit?",
            key="model.name",
        )
    found = {name: x for name, x in batch.items() if name not in names and not name.endswith(SHAPE)}
    for name in names:
        shapes = batch[name + SHAPE].tolist()
        rows = [x[tuple(map(slice, shape))] for x, shape in zip(batch[name], shapes, strict=True) if shape[0]]
        if rows:
            found[name] = join(rows)
    return found


def join(rows: Sequence[Tensor]) -> Tensor:
    """Join the tensors (k, ...) of rows into one tensor (sum of k, ...), as a processor does for a batch."""
    most = [max(sizes) for sizes in zip(*(x.shape[1:] for x in rows), strict=True)]
    return torch.cat([_pad(x, [len(x), *most]) for x in rows])


def arguments(processor: Any, images: Sequence[Any], text: str = "") -> dict[str, Tensor]:
    """A processor's arguments for the images of one row; they do not depend on the row's text."""
    return {} if not images else _arguments(processor, [images], text)


def check(processor: Any, name: str) -> None:
    """Refuse a processor that returns for a batch anything but the joined arguments of its rows.

    Raises:
        InputError: the processor is refused; the message contains the model's ``name``.
    """
    from PIL import Image

    if processor in _checked:
        return
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in _SIZES]
    rows = [pictures[:1], pictures[1:]]
    try:
        alone = [_arguments(processor, [row], "") for row in rows]
        both, later = _arguments(processor, rows, ""), _arguments(processor, rows[:1], "a b c ")
    except (ValueError, TypeError, LookupError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"model.name: the processor of {name!r} refuses rows with several images: {first_line(error)}",
            key="model.name",
        ) from None
    same = all(of.keys() == both.keys() for of in (*alone, later))
    if not same or not all(
        _equal(join([of[key] for of in alone]), x) and _equal(later[key], alone[0][key]) for key, x in both.items()
    ):
        raise InputError(
            f"model.name: the processor of {name!r}, a {type(processor).__name__}, does not prepare the images of a "
            "batch row by row, so that a row alone and in a batch would differ: take another model",
            key="model.name",
        )
    _checked[processor] = True


def _arguments(processor: Any, rows: Sequence[Sequence[Any]], text: str) -> dict[str, Tensor]:
    texts = [text + " ".join([processor.image_token] * len(images)) for images in rows]
    with quiet():
        found = processor(text=texts, images=[list(images) for images in rows], padding=True, return_tensors="pt")
    own = {k for k, x in found.items() if not isinstance(x, Tensor) or x.shape == found["input_ids"].shape}
    return {k: x for k, x in found.items() if k not in own}


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _stack(rows: Sequence[Tensor]) -> Tensor:
    most = [max(sizes) for sizes in zip(*(x.shape for x in rows), strict=True)]
    kind = next((x.dtype for x in rows if x.numel()), torch.float32)
    return torch.stack([_pad(x.to(kind), most) for x in rows]) if rows else torch.zeros(0)


def _pad(x: Tensor, shape: Sequence[int]) -> Tensor:
    if tuple(x.shape) == tuple(shape):
        return x
    out = x.new_zeros(tuple(shape))
    out[tuple(map(slice, x.shape))] = x
    return out
