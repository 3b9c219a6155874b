"""Rows: one client's data as tensors, ready for a model."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedfm.core.deferred import Deferred
from fedfm.linalg.params import to_bytes

if TYPE_CHECKING:
    from fedfm.core.tokens import Tokens

# A message of a conversation: role and content. Further fields, such as tool calls, follow as one JSON object.
# The list of tools, in JSON, is the first message, under its own role.
Turn = tuple[str, ...]
TOOLS = "tools"
Asked = str | tuple[Turn, ...]  # an instruction, or all messages before an answer
Output = str | tuple[Turn, ...]  # an answer: a text, or one message that has calls of tools
INPUT = "\n\n### Input:\n"  # between an instruction and its input
Batch = dict[str, Tensor]  # the model's arguments by name, and "labels"


def blank(output: Output) -> bool:
    """Whether an answer is empty and calls no tool."""
    return isinstance(output, str) and not output.strip()


def has_tools(said: Asked) -> bool:
    """Whether the messages list tools, call them or contain their answers."""
    return not isinstance(said, str) and any(len(turn) > 2 or turn[0] == TOOLS for turn in said)


@dataclass(frozen=True)
class Rows:
    """n rows, ready for a model.

    Attributes:
        tensors: (n, ...) by argument name, e.g. ``pixel_values`` (n, 3, H, W), ``features`` (n, d), or ``input_ids``
            (n, L) if all rows have the same length.
        tokens: n token-id vectors of unequal length, or None; a batch pads them to its longest. Any sequence of vectors
            is accepted.
        token_arguments: further arguments of the model by name, such as the kind of each token. Each has one value
            per token, and 0 at padding.
        labels: int64 (n,); None for language models, whose labels are the tokens.
        pad: the padding token's id.
        pairs: for instruction rows the n pairs (instruction, output) as read; only ``tokens`` may be truncated.
        pictures: n paths or encoded images, which may differ in size, for a client without the model; else None.
        deferred: by argument name, n rows that are computed for each batch, e.g. images that exceed memory.
        augment: names of the random changes to images in training.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    tokens: Tokens | None = None
    labels: Tensor | None = None
    pad: int = 0
    pairs: tuple[tuple[Asked, Output], ...] | None = None
    pictures: Sequence[str | bytes] | None = None
    deferred: dict[str, Deferred] = field(default_factory=dict)
    augment: tuple[str, ...] = ()
    token_arguments: dict[str, Tokens] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens is None:
            return
        from fedfm.core.tokens import Tokens

        if not isinstance(self.tokens, Tokens):
            object.__setattr__(self, "tokens", Tokens.of(self.tokens))

    def __len__(self) -> int:
        if self.pictures is not None:
            return len(self.pictures)
        if self.tokens is not None:
            return len(self.tokens)
        if self.deferred:
            return len(next(iter(self.deferred.values())))
        return next(iter(self.tensors.values())).shape[0] if self.tensors else 0

    @property
    def targets(self) -> dict[str, Tensor]:
        """A mapping with only the entry ``targets`` of :attr:`tensors`; empty if there is no such tensor."""
        return {name: tensor for name, tensor in self.tensors.items() if name == "targets"}

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row; 0 without tokens."""
        if self.tokens is None:
            return self.tensors["input_ids"].shape[1] if "input_ids" in self.tensors else 0
        return int(self.tokens.length.max(initial=0))

    @functools.cached_property
    def features_and_labels(self) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Features (n, d) and labels (n,) for compiled loops, and the smallest and largest label.

        Raises:
            ValueError: there are no labels.
        """
        if self.labels is None:
            raise ValueError("a head is trained on labelled rows")
        x, y = np.ascontiguousarray(self.tensors["features"].numpy(), np.float32), self.labels.numpy()
        return x, y, int(y.min(initial=0)), int(y.max(initial=0))

    @property
    def names(self) -> set[str]:
        """Names of the model's arguments, computed or deferred, except those that are made from ``tokens``."""
        return self.tensors.keys() | self.deferred.keys() | self.token_arguments.keys()

    def sha256(self) -> str:
        """Hash of everything that training reads from the rows, in their order.

        Files are read again, because they may have changed.
        """
        found = hashlib.sha256(f"{len(self)} {self.pad} {self.augment}".encode())
        tensors = self.tensors if self.labels is None else self.tensors | {"+labels": self.labels}
        for name, tensor in sorted(tensors.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(to_bytes(tensor.contiguous()))
        for row in self.tokens or ():
            found.update(f"{len(row)} ".encode())
            found.update(to_bytes(row.contiguous()))
        for name, of in sorted(self.token_arguments.items()):
            found.update(name.encode())
            found.update(to_bytes(of.concatenate()))
        for name, rows in sorted(self.deferred.items()):
            found.update(name.encode())
            for source in rows.sources():
                found.update(hashlib.sha256(source).digest())
        return found.hexdigest()

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> Rows:
        """These rows, in this order."""
        index = torch.as_tensor(index, dtype=torch.int64)
        return replace(
            self,
            tensors={name: tensor[index] for name, tensor in self.tensors.items()},
            tokens=None if self.tokens is None else self.tokens.take(index.numpy()),
            labels=None if self.labels is None else self.labels[index],
            pairs=None if self.pairs is None else tuple(self.pairs[i] for i in index.tolist()),
            pictures=None if self.pictures is None else tuple(self.pictures[i] for i in index.tolist()),
            deferred={name: rows.take(index.numpy()) for name, rows in self.deferred.items()},
            token_arguments={name: of.take(index.numpy()) for name, of in self.token_arguments.items()},
        )

    def compute(self) -> Rows:
        """The same rows with nothing deferred."""
        if not self.deferred:
            return self
        done = {name: rows.compute() for name, rows in self.deferred.items()}
        return replace(self, tensors=self.tensors | done, deferred={})

    def batch(self, index: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """The model's arguments for these rows; ``attention_mask`` (b, L) is 0 at padding."""
        return self.take(index).compute()._as_batch()

    def _as_batch(self) -> Batch:
        """The model's arguments for all rows, none of which is deferred."""
        batch = dict(self.tensors)
        if self.tokens is not None:
            batch["input_ids"] = self.tokens.to_padded(self.pad)
            lengths = torch.from_numpy(self.tokens.length)
            batch |= {name: of.to_padded(0) for name, of in self.token_arguments.items()}
            batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
        if self.labels is not None:
            batch["labels"] = self.labels
        return batch

    def to_padded(self) -> Rows:
        """The same rows as tensors of one length."""
        if self.tokens is None or not len(self):
            return self
        batch = self.batch(range(len(self)))
        labels = batch.pop("labels", None)
        return replace(self, tensors=batch, tokens=None, labels=labels, deferred={}, token_arguments={})

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows in order, ``size`` at a time."""
        return self.each([np.arange(start, min(start + size, len(self))) for start in range(0, len(self), size)])

    def each(self, orders: Sequence[np.ndarray]) -> Iterator[Batch]:
        """The batch for each of these arrays of row indexes; other processes may compute deferred rows in advance."""
        if not self.deferred:
            return (self.batch(index) for index in orders)
        return (part._as_batch() for part in self.parts(orders))

    def parts(self, orders: Sequence[np.ndarray]) -> Iterator[Rows]:
        """Like :meth:`each`, but yields Rows without deferred parts."""
        if not self.deferred:
            return (self.take(index) for index in orders)
        from fedfm.core.loader import ahead

        computed = replace(self, deferred={})
        made = zip(orders, ahead(self.deferred, orders), strict=True)
        return (_with(computed.take(index), tensors) for index, tensors in made)


def _with(rows: Rows, tensors: Mapping[str, Tensor]) -> Rows:
    return replace(rows, tensors={**rows.tensors, **tensors})
