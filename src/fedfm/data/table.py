"""Table: the rows of one source before preprocessing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedfm.core import tasks
from fedfm.core.attachments import Attachment, attachments_of

_PIECE = 1 << 24  # bytes hashed at a time
PARTS = ("train", "val", "test")
_WORDS = {"image": "images", "text": "texts", "features": "feature vectors"}


@dataclass(frozen=True)
class Table:
    """N rows of one kind.

    Attributes:
        kind: the kind of ``inputs``:
            ``image``: a uint8 array (N, H, W, C), C = 1 or 3, or a list of N paths or encoded images (bytes), which
                are decoded on access;
            ``text``: a list of N strings, or for many texts :class:`~fedfm.data.arrow_texts.ArrowTexts`;
            ``features``: a float32 array (N, d);
            ``instruction``: a list of N pairs (instruction, output); for a conversation, the instruction is a tuple of
            all messages before the last answer, each (role, content), or (role, content, further fields as JSON);
            ``preference``: a list of N triples (instruction, better answer, worse answer);
            ``passages``: a list of N consecutive pieces of one running text, for language models;
            ``own``: any sequence of N rows for a Python user's own module;
            and the kinds of other tasks, see :class:`fedfm.tasks.task.RowKind`.
        labels: int64 (N,), or None.
        classes: class names; ``labels`` index them.
        split: str (N,), each "train", "val" or "test".
        columns: further columns by name, each a str array (N,); the partition ``by_column`` uses one.
        source: the name of the source in messages.
        notices: sentences for the user about how the rows were read.
        read: keys of the [data] table that name the columns from which ``inputs`` were made.
        names: names of the columns of feature vectors, if the file has them.
        profile: coarse properties of the rows, see :mod:`fedfm.data.profiles`.
        targets: float64 (N, T) if targets are numbers or several labels; ``classes`` names them, ``labels`` is None.
    """

    kind: str
    inputs: Any
    labels: np.ndarray | None
    classes: tuple[str, ...]
    split: np.ndarray
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    source: str = ""
    notices: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    profile: Mapping[str, Any] = field(default_factory=dict)
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, split: str) -> np.ndarray:
        """Ascending indexes of the rows of a split."""
        return np.flatnonzero(self.split == split)

    def take(self, index: Sequence[int] | np.ndarray) -> Table:
        """A table of these rows, in this order."""
        index = np.asarray(index, dtype=np.int64)
        if isinstance(self.inputs, np.ndarray):
            inputs = self.inputs[index]
        elif isinstance(self.inputs, list):
            inputs = [self.inputs[i] for i in index]
        else:
            inputs = _take_rows(self.inputs, index)
        return replace(
            self,
            inputs=inputs,
            labels=None if self.labels is None else self.labels[index],
            targets=None if self.targets is None else self.targets[index],
            split=self.split[index],
            columns={name: column[index] for name, column in self.columns.items()},
        )


def words_of(kind: str) -> str:
    """The plural words for a kind of rows, such as "feature vectors"."""
    of = tasks.row_kind(kind)
    return _WORDS[kind] if of is None else of.words


def fingerprint(table: Table) -> str:
    """SHA-256 (64 hex digits) over kind, inputs, labels or targets, class names and split.

    It covers the bytes of image files and attachments and, for kind "own", the number of rows. It covers no paths, no
    further columns and no notices, so it does not depend on the source.
    """
    digest = hashlib.sha256()

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little") + data)  # lengths make the encoding of a list unique

    def add_array(array: np.ndarray) -> None:
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        add(f"{array.dtype.str} {array.shape}".encode())
        digest.update(array.nbytes.to_bytes(8, "little"))
        step = max(_PIECE // max(array[:1].nbytes, 1), 1)  # a memory-mapped array is never completely in memory
        for start in range(0, len(array), step):
            digest.update(array[start : start + step].data)

    add(table.kind.encode())
    if table.kind == "own":  # a random transform may change the rows at each read
        add(str(len(table)).encode())
    elif isinstance(table.inputs, np.ndarray):
        add_array(table.inputs)
    else:
        add(str(len(table.inputs)).encode())
        for item in table.inputs:
            if table.kind == "image":
                add(item if isinstance(item, bytes) else Path(item).read_bytes())
            else:
                for text in _texts(item):
                    add(text.encode("utf-8", "surrogatepass"))
                for file in attachments_of(item):
                    add(file.sha256.encode())
    add(b"unlabelled" if table.labels is None else b"labelled")
    if table.labels is not None:
        add_array(table.labels.astype(np.int64))
    if table.targets is not None:
        add_array(table.targets)
    for name in (*table.classes, "\0", *table.split.tolist()):
        add(name.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _texts(item: Any) -> Iterator[str]:
    """The texts of one row; an additional text before each conversation or list gives its length."""
    for part in (item,) if isinstance(item, str) else item:
        if isinstance(part, str):
            yield part
        elif not isinstance(part, Attachment):
            yield f"{len(part)} messages"
            for turn in part:
                yield from _strings((turn,) if isinstance(turn, str | Attachment) else turn)


def contents(item: Any) -> Iterator[str]:
    """The texts of one row, without the roles of a conversation and without attachments.

    Example:
        >>> list(contents(((("user", "Hello."), ("assistant", "Yes?")), "Bye.")))
        ['Hello.', 'Yes?', 'Bye.']
    """
    for part in (item,) if isinstance(item, str) else item:
        if isinstance(part, str):
            yield part
        elif not isinstance(part, Attachment):
            for turn in part:
                yield from _strings((turn,) if isinstance(turn, str | Attachment) else turn[1:])


def _strings(parts: Sequence[Any]) -> Iterator[str]:
    return (part for part in parts if isinstance(part, str))


def inputs_of(kind: str, item: Any) -> Iterator[str]:
    """The texts of one row as in :func:`contents`, without the targets at the end of a row of this kind."""
    of = tasks.row_kind(kind)
    return contents(item if of is None or of.inputs is None else item[: of.inputs])


@dataclass(frozen=True)
class ClientRows:
    """The rows of one client as ascending indexes into a Table."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


class DealtRows(Mapping[str, ClientRows]):
    """The rows of many clients, in three arrays. A client's rows are views, which exist only while they are used.

    Args:
        names: the clients in order.
        parts: for train, val and test the rows in order of clients (n,), and the place (K + 1,) where each client's
            rows begin; the last place is n.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._places = {name: k for k, name in enumerate(names)}
        self.parts = dict(zip(PARTS, parts, strict=True))

    def __getitem__(self, name: str) -> ClientRows:
        k = self._places[name]
        return ClientRows(*[rows[start[k] : start[k + 1]] for rows, start in self.parts.values()])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places


@dataclass(frozen=True)
class FederatedData:
    """A table partitioned between clients.

    Attributes:
        clients: name -> rows; names sort in the order of the partition ("client-00" ...). Each training row is in
            exactly one client's ``train`` or ``val``. The client's own model is evaluated on its ``test``.
        test: the global test rows, on which no client trains.
        notices: sentences for the user; first the table's, then the partition's.
    """

    table: Table
    clients: Mapping[str, ClientRows]
    test: np.ndarray
    notices: tuple[str, ...] = ()

    def all_rows(self, part: str) -> np.ndarray:
        """All clients' rows of a part ("train", "val" or "test"), client by client."""
        if isinstance(self.clients, DealtRows):
            return self.clients.parts[part][0]
        return np.concatenate([np.zeros(0, np.int64), *(getattr(rows, part) for rows in self.clients.values())])

    def sizes(self, part: str) -> np.ndarray:
        """Each client's number of rows of a part (K,)."""
        if isinstance(self.clients, DealtRows):
            return np.diff(self.clients.parts[part][1])
        return np.array([len(getattr(rows, part)) for rows in self.clients.values()], dtype=np.int64)


def _take_rows(inputs: Any, index: np.ndarray) -> Any:
    """The rows of ``inputs`` at these positions; ``inputs`` are texts in Arrow's memory, or another sequence."""
    from fedfm.data.arrow_texts import ArrowTexts

    return inputs.take(index) if isinstance(inputs, ArrowTexts) else [inputs[i] for i in index]
