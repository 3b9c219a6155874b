"""What is known of a task below the models: its names, its kinds of rows, its columns, and facts as data.

:class:`fedfm.tasks.task.Task` says what each fact means, and has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol


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


class TaskFacts(Protocol):
    """The facts of a task, see :class:`fedfm.tasks.task.Task`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    default: ClassVar[bool]
    in_files: ClassVar[bool]
    kinds: ClassVar[tuple[str, ...]]
    own_kind: ClassVar[RowKind | None]
    implied_by: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[Column, ...]]
    endings: ClassVar[tuple[str, ...]]
    new_head: ClassVar[bool]
    needs_classes: ClassVar[bool]
    one_class_a_row: ClassVar[bool]
    linear_head: ClassVar[bool]
    two_encoders: ClassVar[bool]
    scores_unseen_classes: ClassVar[bool]
    is_language_model: ClassVar[bool]
    means_over_tokens: ClassVar[bool]
    compared_by_row: ClassVar[bool]
    keeps_base: ClassVar[bool]
    loss_is_opaque: ClassVar[bool]
    softmax: ClassVar[bool]
    texts_a_row: ClassVar[int]
    no_pretraining: ClassVar[str]
    adaptations: ClassVar[tuple[str, ...]]
    lora_scale: ClassVar[float]
    figures: ClassVar[tuple[str, ...]]
    drawn: ClassVar[tuple[str, ...]]
    sums: ClassVar[tuple[str, ...]]
    row_means: ClassVar[Mapping[str, str]]
    problem_type: ClassVar[str | None]

    @property
    def class_templates(self) -> tuple[str, ...]:
        """Texts with one {} for a class's name."""

    @property
    def mixes_rows(self) -> str:
        """Why the loss of a batch is no mean over its rows."""

    @property
    def classifies_by_head(self) -> bool:
        """Whether it is the plain classifier."""

    @property
    def table_kinds(self) -> tuple[str, ...]:
        """Kinds of rows as they are read for this task."""

    @property
    def answers(self) -> bool:
        """Whether its rows are prompts with answers."""
