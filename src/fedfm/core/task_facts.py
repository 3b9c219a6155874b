"""The facts of a task, for type checkers.

:class:`fedfm.tasks.task.Task` has all of them, and documents what each one means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol, Self

from fedfm.core.row_kinds import Column, RowKind


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
    class_word: ClassVar[str]
    one_class_a_row: ClassVar[bool]
    own_targets: ClassVar[bool]
    own_modules: ClassVar[bool]
    absent_target: ClassVar[float | None]
    linear_head: ClassVar[bool]
    two_encoders: ClassVar[bool]
    images_in_texts: ClassVar[bool]
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
    lists: ClassVar[tuple[str, ...]]
    least_rows: ClassVar[int]
    row_means: ClassVar[Mapping[str, str]]
    problem_type: ClassVar[str | None]

    @classmethod
    def of(cls, spec: Any) -> Self:
        """The task with the values of its keys in a [model] table."""

    @property
    def class_templates(self) -> tuple[str, ...]:
        """Texts with one {} for a class's name."""

    @property
    def trained_classes(self) -> int | None:
        """How many classes have training rows: these are the first classes in order. None means all."""

    @property
    def needs_validation(self) -> str:
        """The setting that needs validation rows; "" if none does."""

    @property
    def reads_all_rows(self) -> tuple[str, str] | None:
        """What the task reads from all clients' training rows, and settings that avoid it; None if nothing is read."""

    @property
    def mixes_rows(self) -> str:
        """Why the loss of a batch is not a mean over its rows; empty if it is one."""

    def coarsen(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """A silo's scores and sums; lists keep only as much detail as the pooled scores need."""

    @property
    def classifies_by_head(self) -> bool:
        """Whether the task is plain classification."""

    @property
    def table_kinds(self) -> tuple[str, ...]:
        """Kinds of rows that are read for this task."""

    @property
    def generates(self) -> bool:
        """Whether its models generate texts."""

    @property
    def answers(self) -> bool:
        """Whether its rows are prompts with answers."""
