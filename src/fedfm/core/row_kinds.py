"""What a task says of its rows: the columns that it reads, their kind, and rows that it has read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Column:
    """A key of the [data] table and of a silo's file that names a column.

    Attributes:
        key: the key.
        help: what the column holds.
        default: the column's name where the key is not set; empty: the key's.
    """

    key: str
    help: str
    default: str = ""

    @property
    def name(self) -> str:
        """The column's name where the key is not set."""
        return self.default or self.key


@dataclass(frozen=True)
class RowKind:
    """A kind of rows that belongs to one task.

    Attributes:
        name: of the kind, as ``Table.kind`` has it.
        words: plural, in messages.
        answered: a row is (what was asked, an answer, ...), which a template writes.
        joined: rows are consecutive pieces of one text, so that a part of them is a text, too.
        remote: silos may hold such rows where the server has none, and ``data.kind`` names it.
        predicted_as: the kind of such rows where they are to be predicted; empty: the same.
        wording: a row is texts, which are compared regardless of case and spaces.
        inputs: so many parts of a row, from the first, are what a model reads, the others are targets; None: it reads
            all of them.
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
        kind: of the rows, as ``Table.kind`` has it.
        inputs: the rows.
        used: names of the columns that are read.
        notices: for the user, on how they were read.
        classes: names of the classes of a task whose labels are in ``inputs``.
    """

    kind: str
    inputs: Any
    used: frozenset[str]
    notices: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
