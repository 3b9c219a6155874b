"""The protocol of a task that has a model, for type checkers: each task is a :class:`fedfm.tasks.task.Task`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from fedfm.data.task_rows import RowTask

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from fedfm.core.output_files import RowPictures
    from fedfm.core.row_targets import FigureTable
    from fedfm.core.rows import Batch, Rows
    from fedfm.core.score_plots import Groups
    from fedfm.data.table import Table
    from fedfm.linalg.params import Params
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools
    from fedfm.models.spec import ModelSpec
    from fedfm.models.trained import Scores, Trained


class ModelTask(RowTask, Protocol):
    """A task as models and runs use it; :class:`fedfm.tasks.task.Task` documents what its methods return."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The task with the values of its keys in a [model] table."""

    @property
    def common_figures(self) -> tuple[str, ...]:
        """The scores of all tasks that several clients together have, besides accuracy and loss."""

    def part(self, table: Table, index: np.ndarray) -> Table:
        """The rows with these indexes, and what :meth:`rows` needs of the other rows."""

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        """Rows as tensors and tokens, with their targets."""

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        """Lines for the user, before a run."""

    def auto_class(self, kind: str) -> str:
        """The last part of the name of transformers' class ``AutoModelFor...``."""

    def input_kind(self, kind: str, *, text: bool) -> str:
        """The kind of input that the model reads for rows of this kind."""

    def model_class(self, kind: str, path: Path | str, config: Any) -> tuple[Any, tuple[str, ...]]:
        """Transformers' class that loads the model, and lines for the user."""

    def complete_tools(self, tools: Tools, path: Path | str, config: Any) -> Tools:
        """The tools with further preprocessors from the model's folder."""

    def peft_type(self, kind: str) -> str | None:
        """PEFT's name of the task."""

    def processor(self, path: Path | str, spec: ModelSpec, config: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
        """An object that prepares rows with this tokenizer, or None; and lines for the user."""

    def fit_tokenizer(self, tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
        """The template for the tools, and lines for the user."""

    def fit_config(self, config: Any, name: str) -> None:
        """Set what the task needs in a model's configuration."""

    def check_tools(self, tools: Tools, name: str) -> None:
        """Refuse values of the task's keys that do not fit the tools."""

    def check_outputs(self, name: str, found: Sequence[int], images: Sequence[int], classes: int) -> None:
        """Refuse outputs of a user's module that have another shape than the task needs."""

    def check_single_encoder(self) -> None:
        """Refuse values of the task's keys that need a model of two encoders."""

    def answer_limit(self, tools: Tools) -> int:
        """Largest number of tokens in a generated answer."""

    def encode(self, model: Network, rows: Rows) -> Rows:
        """The rows with the values that are computed only once for each row."""

    def prompts(self, rows: Rows) -> Rows:
        """The rows without their answers."""

    def logits(self, model: Network, batch: Batch) -> Tensor:
        """The model's outputs for a batch."""

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets of the cross-entropy."""

    def count_targets(self, batch: Batch) -> int:
        """The number of targets in the mean loss of this batch."""

    def loss(self, model: Network, batch: Batch) -> Tensor:
        """The mean loss."""

    def objective(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits and targets."""

    def head_targets(self, rows: Rows, outputs: int) -> Tensor:
        """The vectors (n, C) that a linear head is fitted to by least squares."""

    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each row as sums and counts."""

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        """Logits of all rows."""

    def scores(self, model: Network, rows: Rows, batch_size: int = 64) -> Scores:
        """Scores of the model on the rows."""

    def scores_of(self, model: Network, rows: Rows, logits: Tensor) -> Scores:
        """Scores from the logits of these rows."""

    def join_scores(self, parts: Sequence[Mapping[str, Any]]) -> Scores:
        """Scores on the union of several parts of rows, from the parts' scores."""

    def choose(self, scores: Mapping[str, Any], classes: tuple[str, ...]) -> Mapping[str, Any]:
        """Values of the task's keys that follow from scores on validation rows."""

    def with_chosen(self, chosen: Mapping[str, Mapping[str, float]], classes: Sequence[str]) -> Self:
        """The task with values of keys that a server chose; raises a ClientFault for values that it cannot choose."""

    def check_scores(self, scores: Mapping[str, Any], classes: Sequence[str]) -> None:
        """Raise a ClientFault if no rows can have the scores and sums that a client sent."""

    def coarsen(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """A silo's scores and sums; lists keep only as much detail as the pooled scores need."""

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        """Lines for the user about a run's figures, after the run."""

    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        """The predictions that ``fedfm predict`` writes for the rows."""

    def generation_settings(self, model: Network) -> dict[str, Any]:
        """Settings of generation that an export gets."""

    def for_export(self, model: Network, w: Params) -> tuple[Self, Params]:
        """The task and the weights of an export."""

    def add_files(self, model: Network, to: str, folder: Path) -> None:
        """Add files with which other libraries load an export."""

    def about_outputs(self) -> str:
        """A sentence for the reader of an export about the model's outputs."""

    def about_export(self, to: str, folder: Path) -> str:
        """Sentences for the reader of an export in the format ``to``."""

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        """Tables of a report about the task's own scores."""

    def plots(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[Groups]:
        """Plots of a report about predicted values against true values."""

    def pictures(self, trained: Trained, table: Table) -> RowPictures | None:
        """Pictures of rows with their targets and predictions."""

    def pipeline_of(self, model: Network, kind: str) -> str | None:
        """The hub's tag of an export's pipeline."""

    def describe(self, model: Network) -> dict[str, Any]:
        """The entries about the task in the configuration of an export."""
