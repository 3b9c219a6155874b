"""What a task states of itself, and how its rows are read and become a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fedfm.core.fields import key_of
from fedfm.core.row_kinds import Column, Reading, RowKind

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from fedfm.core.row_targets import RowTargets
    from fedfm.core.rows import Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import FederatedData, Table
    from fedfm.models.preprocessors import Tools
    from fedfm.models.spec import ModelSpec

LORA = ("lora", "ffa_lora")


@dataclass(frozen=True)
class FactsAndRows:
    """The part of a task that comes before its model; :class:`fedfm.tasks.task.Task` has the rest.

    Attributes:
        name: the task's name in ``model.task``, and the name of its file.
        default: whether it is the task of rows that imply no other.
        in_files: whether an experiment file may name it.
        kinds: kinds of rows that its models read.
        own_kind: the kind of rows that belongs to this task.
        implied_by: kinds of rows that imply the task.
        columns: keys of the [data] table and of a silo's file that name the columns of the task's rows.
        endings: suffixes of the files that :meth:`sheet` reads. If the experiment names the task, the method also
            reads plain text (.txt).
        new_head: whether transformers builds a new head for the classes.
        needs_classes: whether its rows have classes.
        class_word: what messages call one of the names in ``Table.classes``, such as "target" or "tag".
        one_class_a_row: whether a row has one label out of several classes. Then the logits are (b, C), and the loss is
            their cross-entropy.
        own_targets: whether :meth:`read_targets` reads the targets of images, texts and vectors, because the targets
            are not one class per row.
        own_modules: whether ``model.name`` may name a user's function that makes the module, see
            :mod:`fedfm.models.user.function_module`. Such a task overrides :meth:`check_outputs`.
        absent_target: the value that rows get for a target that their client lacks; if None, such rows are refused.
        linear_head: whether the model ends in a linear map that fedfm uses, so that rows have features before this map.
        two_encoders: whether the model compares rows with texts, as a CLIP does.
        images_in_texts: whether rows have images among their texts, so that the model's part for images is used.
        is_language_model: whether the model is a causal language model, whose rows are tokens without labels.
        means_over_tokens: whether the loss of a row is a mean over tokens.
        compared_by_row: whether audits may compare a model's results for single rows.
        keeps_base: whether the loss compares the model with its base model; then no adaptation may change the base.
        loss_is_opaque: whether the loss of a single row is not known, but only the mean loss of a batch.
        softmax: whether the loss is the cross-entropy of the logits. If :attr:`mixes_rows` gives a reason, the
            value does not count. A class that overrides ``loss`` or ``objective`` has to set ``softmax`` again.
        texts_a_row: number of texts from which the tokens of a row are made.
        no_pretraining: why ``fedfm pretrain`` does not train this task; empty if it does.
        adaptations: the adaptations that the task supports.
        lora_scale: the default of alpha / rank.
        figures: names of the task's own scores, which results report in addition to the common scores.
        drawn: the figures that a report plots over the rounds; they are shares from 0 to 1.
        sums: names of the sums over rows from which its scores are computed; empty if parts' scores cannot be joined.
        lists: names of the figures and sums that are lists, with an entry for each class or target.
        least_rows: the smallest number of rows on whose scores a silo reports; sums of fewer rows disclose targets.
        row_means: for each score that is a mean over rows, the name of the sum over rows. A silo sends only the score,
            since the sum follows from it.
        problem_type: the value of ``problem_type`` in an exported classifier's configuration; None if it has none.
    """

    name: ClassVar[str]
    default: ClassVar[bool] = False
    in_files: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = ("image", "text", "features")
    own_kind: ClassVar[RowKind | None] = None
    implied_by: ClassVar[tuple[str, ...]] = ()
    columns: ClassVar[tuple[Column, ...]] = ()
    endings: ClassVar[tuple[str, ...]] = ()
    new_head: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    class_word: ClassVar[str] = "class"
    one_class_a_row: ClassVar[bool] = False
    own_targets: ClassVar[bool] = False
    own_modules: ClassVar[bool] = False
    absent_target: ClassVar[float | None] = None
    linear_head: ClassVar[bool] = False
    two_encoders: ClassVar[bool] = False
    images_in_texts: ClassVar[bool] = False
    is_language_model: ClassVar[bool] = False
    means_over_tokens: ClassVar[bool] = False
    compared_by_row: ClassVar[bool] = False
    keeps_base: ClassVar[bool] = False
    loss_is_opaque: ClassVar[bool] = False
    softmax: ClassVar[bool] = True
    texts_a_row: ClassVar[int] = 1
    no_pretraining: ClassVar[str] = ""
    adaptations: ClassVar[tuple[str, ...]] = ("full", "top_layers", *LORA)
    lora_scale: ClassVar[float] = 2.0
    figures: ClassVar[tuple[str, ...]] = ()
    drawn: ClassVar[tuple[str, ...]] = ()
    sums: ClassVar[tuple[str, ...]] = ()
    lists: ClassVar[tuple[str, ...]] = ()
    least_rows: ClassVar[int] = 1
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType({})
    problem_type: ClassVar[str | None] = None

    def __str__(self) -> str:
        return self.name

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The task with the values of its keys in a [model] table."""
        given = vars(spec)
        return cls(**{f.name: given[key] for f in fields(cls) if (key := key_of(f.name)) in given})

    @property
    def classifies_by_head(self) -> bool:
        """Whether it is the plain classifier: one label per row, a new head, softmax and cross-entropy."""
        return self.one_class_a_row and self.new_head

    @property
    def table_kinds(self) -> tuple[str, ...]:
        """The kinds that rows can have after they are read for this task."""
        return self.kinds if self.own_kind is None else (self.own_kind.name,)

    @property
    def answers(self) -> bool:
        """Whether its rows are prompts with answers, which a template turns into text."""
        return self.own_kind is not None and self.own_kind.answered

    @property
    def generates(self) -> bool:
        """Whether its models generate texts, by the settings of ``generation_config.json``."""
        return self.answers

    @property
    def class_templates(self) -> tuple[str, ...]:
        """Texts with one {} for a class's name, from which a model of two encoders makes the texts of the classes."""
        return ()

    @property
    def trained_classes(self) -> int | None:
        """The number of classes with training rows (they come first); None if every class has training rows."""
        return None

    @property
    def reads_all_rows(self) -> tuple[str, str] | None:
        """(what the task takes from all clients' training rows, how to avoid it); None if it takes nothing."""
        return None

    @property
    def mixes_rows(self) -> str:
        """Why the loss of a batch is not a mean over its rows; empty if it is such a mean."""
        return ""

    @property
    def needs_validation(self) -> str:
        """The setting for which :meth:`choose` needs validation rows; empty if it needs none."""
        return ""

    def packs(self, kind: str) -> bool:
        """Whether rows of this kind are joined and cut into blocks, so that blocks and rows differ in number."""
        return False

    def coarsen(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """The scores and sums of a silo, with no more detail in its lists than the pooled scores need."""
        return scores

    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        """Whether these columns have rows of this task; if the experiment names no task, this decides the task."""
        return False

    def sheet(self, text: str, source: str) -> Sheet:
        """The columns of a file with one of the :attr:`endings`; ``source`` names the file in messages.

        Raises:
            InputError: the text does not have the format; the message says where.
        """
        raise NotImplementedError(f"{self.name}: no files of its own")

    def folder(self, path: Path, spec: DataSpec, *, labelled: bool) -> Sheet | None:
        """The columns of a folder in the task's own layout, such as images next to masks; None for other folders.

        By default this is a folder of the files that one of :attr:`columns` holds, if there is such a column.

        Args:
            spec: names of the columns.
            labelled: False for rows to predict, whose targets may be missing.

        Raises:
            InputError: the folder has this layout, but is incomplete; the message says where.
        """
        held = next((column for column in self.columns if column.files), None)
        if held is None:
            return None
        from fedfm.data.sources import _file_folder

        return _file_folder.sheet(path, spec, spec.column(held.key), held.files, labelled=labelled)

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading | None:
        """The rows of these columns; None if images, texts and labels are read as for any task.

        Args:
            spec: names of the columns.
            source: name of the file in messages.
            labelled: False for rows to predict, which may have no answers and no labels.

        Raises:
            InputError: a column is missing, or a cell is empty or malformed; the message says where.
        """
        return None

    def read_targets(self, sheet: Sheet, spec: DataSpec, *, source: str) -> RowTargets:
        """The targets of images, texts or feature vectors, for a task with :attr:`own_targets`.

        Args:
            sheet: the columns. Those of an npz file are its arrays with one entry per row; ``data.label`` names ``y``.
            spec: names of the columns.
            source: name of the file in messages.

        Raises:
            InputError: a column is missing, or a cell is empty or malformed; the message says where.
        """
        raise NotImplementedError(f"{self.name}: no targets of its own")

    def keys_of_rows(self, data: FederatedData) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        """Keys of the [model] table that follow from the training rows of all clients, and notices for the user.

        The manifest stores these keys, so that all parties and later commands use the same values.

        Raises:
            InputError: the model cannot learn from these rows.
        """
        return {}, ()

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """The rows with randomly permuted targets, on which an attacker trains; an InputError if they have none."""
        from fedfm.tasks import _shuffling

        return _shuffling.shuffle(rows, rng)

    def part(self, table: Table, index: np.ndarray) -> Table:
        """The rows ``index`` of the table, with what :meth:`rows` needs to know of the other rows."""
        return table.take(index)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        """Rows of texts, or of the task's own kind, as tensors and tokens, with their targets.

        Args:
            part: the rows.
            tools: the tokenizer, the largest number of tokens of a row, and the template.
            classes: the model's classes, in the order of the logits.

        Raises:
            InputError: a label is none of the classes.
        """
        from fedfm.core.rows import Rows
        from fedfm.models import preprocessing

        tokens, more = preprocessing.encode(part.inputs, tools.tokenizer, tools.max_length)
        labels, targets = preprocessing.labels_of(part, classes), preprocessing.targets_of(part, classes, self)
        return Rows(
            targets, tokens=tokens, labels=labels, pad=int(tools.tokenizer.pad_token_id or 0), token_arguments=more
        )

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        """Notices before a run about rows that are cut off or probably wrong; ``parts``: "training" and "test" rows."""
        return []
