"""Table: the rows of one source as they were read, before any model has seen them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["image", "text", "features", "instruction", "passages", "own"]


@dataclass(frozen=True)
class Table:
    """N rows of one kind.

    Attributes:
        kind: what ``inputs`` holds:
            ``image``: a uint8 array (N, H, W, C), C = 1 or 3, or a list of N paths (or encoded pictures as bytes, where
                a data set of unequal sizes keeps them inside its own files), decoded when they are needed;
            ``text``: a list of N strings;
            ``features``: a float32 array (N, d);
            ``instruction``: a list of N pairs (instruction, output);
            ``passages``: a list of N consecutive pieces of one running text, for language models;
            ``own``: any sequence of N rows that only a Python user's own module understands.
        labels: int64 (N,), or None where rows have none.
        classes: class names; ``labels`` index them.
        split: str (N,), each "train", "val" or "test".
        columns: further columns by name, each a str array (N,), for ``by_column``.
        source: where the rows came from, for messages.
        notices: what the user should know about how they were read.
    """

    kind: Kind
    inputs: Any
    labels: np.ndarray | None
    classes: tuple[str, ...]
    split: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    source: str = ""
    notices: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, split: str) -> np.ndarray:
        """Indexes of the rows of a split, ascending."""
        return np.flatnonzero(self.split == split)

    def take(self, index: Sequence[int] | np.ndarray) -> Table:
        """The table of these rows, in this order."""
        index = np.asarray(index, dtype=np.int64)
        inputs = self.inputs[index] if isinstance(self.inputs, np.ndarray) else [self.inputs[i] for i in index]
        return replace(
            self,
            inputs=inputs,
            labels=None if self.labels is None else self.labels[index],
            split=self.split[index],
            columns={name: column[index] for name, column in self.columns.items()},
        )


def fingerprint(table: Table) -> str:
    """SHA-256 (64 hex digits) over kind, inputs, labels, class names and split.

    Pictures in files count by their bytes, rows of kind "own" by their number. The same wherever the rows came from:
    not over paths, further columns or notices.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths first: no two lists of pieces look alike

    def add_array(array: np.ndarray) -> None:
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        add(f"{array.dtype.str} {array.shape}".encode())
        add(array.tobytes())

    add(table.kind.encode())
    if table.kind == "own":  # may be drawn anew whenever they are read, by a random transform: only counted
        add(str(len(table)).encode())
    elif isinstance(table.inputs, np.ndarray):
        add_array(table.inputs)
    else:
        add(str(len(table.inputs)).encode())
        for item in table.inputs:
            if table.kind == "image":
                add(item if isinstance(item, bytes) else Path(item).read_bytes())
            else:
                for text in (item,) if isinstance(item, str) else item:
                    add(text.encode("utf-8", "surrogatepass"))
    add(b"unlabelled" if table.labels is None else b"labelled")
    if table.labels is not None:
        add_array(table.labels.astype(np.int64))
    for name in (*table.classes, "\0", *table.split.tolist()):
        add(name.encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class ClientRows:
    """Indexes into a Table, ascending: the rows of one client."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class FederatedData:
    """A table dealt to clients.

    Attributes:
        clients: name -> rows; names sort in the order of the partition ("client-00" ...). Every training row is in
            exactly one client's ``train`` or ``val``; ``test`` are the rows on which the client's own model is judged.
        test: the global test rows, on which no client trains.
        notices: what the user should know of the rows and of how they were dealt: the table's notices come first.
    """

    table: Table
    clients: dict[str, ClientRows]
    test: np.ndarray
    notices: tuple[str, ...] = ()
