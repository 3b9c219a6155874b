"""Rows: one client's data as tensors, ready for a model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]  # the model's arguments by name, and "labels"


@dataclass(frozen=True)
class Rows:
    """n model-ready rows.

    Attributes:
        tensors: argument name -> (n, ...), e.g. ``pixel_values`` (n, 3, H, W), ``features`` (n, d), or ``input_ids``
            (n, L) if all rows have the same length.
        tokens: n token-id vectors of unequal length, or None; batches pad them to the longest of the batch.
        labels: int64 (n,); None for language models, whose labels are the tokens.
        pad: the padding token's id.
        pairs: for instruction rows the n pairs (instruction, output) as read; ``tokens`` may be truncated.
        pictures: n paths or encoded pictures of several sizes, for a party without a model; else None.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tokens: tuple[Tensor, ...] | None = None
    labels: Tensor | None = None
    pad: int = 0
    pairs: tuple[tuple[str, str], ...] | None = None
    pictures: tuple[str | bytes, ...] | None = None

    def __len__(self) -> int:
        if self.pictures is not None:
            return len(self.pictures)
        if self.tokens is not None:
            return len(self.tokens)
        return next(iter(self.tensors.values())).shape[0] if self.tensors else 0

    @property
    def longest(self) -> int:
        """Tokens of the longest row; 0 if the rows have none."""
        if self.tokens is None:
            return self.tensors["input_ids"].shape[1] if "input_ids" in self.tensors else 0
        return max(map(len, self.tokens), default=0)

    @functools.cached_property
    def labelled(self) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Features (n, d) and labels (n,) for compiled loops, and the smallest and largest label.

        Raises:
            ValueError: there are no labels.
        """
        if self.labels is None:
            raise ValueError("a head is trained on labelled rows")
        x, y = np.ascontiguousarray(self.tensors["features"].numpy(), np.float32), self.labels.numpy()
        return x, y, int(y.min(initial=0)), int(y.max(initial=0))

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> Rows:
        """These rows, in this order."""
        index = torch.as_tensor(index, dtype=torch.int64)
        return replace(
            self,
            tensors={name: tensor[index] for name, tensor in self.tensors.items()},
            tokens=None if self.tokens is None else tuple(self.tokens[i] for i in index.tolist()),
            labels=None if self.labels is None else self.labels[index],
            pairs=None if self.pairs is None else tuple(self.pairs[i] for i in index.tolist()),
            pictures=None if self.pictures is None else tuple(self.pictures[i] for i in index.tolist()),
        )

    def batch(self, index: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """The model's arguments for these rows; ``attention_mask`` (b, L) is 0 at padding."""
        part = self.take(index)
        batch = dict(part.tensors)
        if part.tokens is not None:
            batch["input_ids"] = torch.nn.utils.rnn.pad_sequence(
                list(part.tokens), batch_first=True, padding_value=self.pad
            )
            lengths = torch.tensor([len(t) for t in part.tokens])
            batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        if part.labels is not None:
            batch["labels"] = part.labels
        return batch

    def padded(self) -> Rows:
        """The same rows as tensors of one length."""
        if self.tokens is None or not len(self):
            return self
        batch = self.batch(range(len(self)))
        labels = batch.pop("labels", None)
        return replace(self, tensors=batch, tokens=None, labels=labels)

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.batch(range(start, min(start + size, len(self))))
