"""The rows of a task: the columns that it reads, the kind of its rows, and rows that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARED = ("image", "text", "features")  # kinds of rows that belong to no single task


@dataclass(frozen=True)
class Column:
    """A key of the [data] table and of a silo's file that names a column, or several.

    Attributes:
        key: the key.
        help: what the column holds.
        default: the column's name if the key is not set; if empty, this is the key itself.
        several: whether the key's value is a list of column names. Without the key, the list is empty.
        files: "image" or "recording" if a folder of such files is a set of rows, with the files in this column.
    """

    key: str
    help: str
    default: str = ""
    several: bool = False
    files: str = ""

    @property
    def name(self) -> str:
        """The column's name if the key is not set."""
        return self.default or self.key


@dataclass(frozen=True)
class RowKind:
    """A kind of rows that belongs to one task.

    Attributes:
        name: name of the kind, as in ``Table.kind``.
        words: the rows in words, plural, for messages.
        answered: whether a row is (prompt, answer, ...), which a template turns into text.
        joined: whether rows are consecutive pieces of one text, so that consecutive rows together are a text, too.
        remote: whether silos may hold such rows while the server has none; then ``data.kind`` may name this kind.
        predicted_as: the kind of such rows in predictions; if empty, the same kind.
        wording: whether a row consists of texts, which are compared regardless of case and spaces.
        inputs: number of leading parts of a row that a model reads; the others are targets. If None, it reads all.
    """

    name: str
    words: str
    answered: bool = False
    joined: bool = False
    remote: bool = True
    predicted_as: str = ""
    wording: bool = True
    inputs: int | None = None


@dataclass(frozen=True)
class Reading:
    """Rows that a task reads from columns.

    Attributes:
        kind: kind of the rows, as in ``Table.kind``.
        inputs: the rows.
        used: names of the columns that are read.
        notices: notices for the user on how the rows were read.
        classes: names of the classes of a task whose labels are in ``inputs``.
    """

    kind: str
    inputs: Any
    used: frozenset[str]
    notices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
