"""Task: the facts and the computations that define a task.

A task is a frozen dataclass in a file of its own. Its fields are the keys of the [model] table that only this task has.
Its class variables are facts, which the packages below read. Its methods are the task's computations. The defaults
of these classes fit a classifier of rows: logits (b, C), and one label per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from fedfm.core.metric_names import BALANCED_ACCURACY, MACRO_F1, PERPLEXITY
from fedfm.core.row_kinds import Column as Column
from fedfm.core.row_kinds import Reading as Reading
from fedfm.core.row_kinds import RowKind as RowKind
from fedfm.errors import E_FIELD, ClientFault
from fedfm.models.trained import Scores as Scores
from fedfm.models.trained import Trained as Trained
from fedfm.tasks._facts_and_rows import LORA as LORA
from fedfm.tasks._facts_and_rows import FactsAndRows
from fedfm.tasks._sums import Sums as Sums
from fedfm.tasks._sums import add, finite, mean, numbers

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from fedfm.core.output_files import RowPictures
    from fedfm.core.row_targets import FigureTable
    from fedfm.core.rows import Batch, Rows
    from fedfm.core.score_plots import Groups
    from fedfm.data.table import Table
    from fedfm.linalg.params import Params
    from fedfm.models.model_task import ModelTask
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools
    from fedfm.models.spec import ModelSpec


@dataclass(frozen=True)
class Task(FactsAndRows):
    """A task; the defaults fit a classifier.

    :class:`fedfm.tasks._facts_and_rows.FactsAndRows` documents its facts and how its rows are read.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Set ``softmax`` to False for a task with its own loss, unless the task's class sets it."""
        super().__init_subclass__(**keywords)
        if {"loss", "objective"} & vars(cls).keys() and "softmax" not in vars(cls):
            cls.softmax = False

    @property
    def common_figures(self) -> tuple[str, ...]:
        """The scores of all tasks, besides accuracy and loss, that this task computes from :attr:`sums`.

        Results have them as ``local_...``, too: over the test rows of all clients together.
        """
        known = self.figures_of({})
        return tuple(name for name in (BALANCED_ACCURACY, MACRO_F1, PERPLEXITY) if name in known)

    # --- model --------------------------------------------------------------------------------------------------------
    def auto_class(self, kind: str) -> str:
        """Name of transformers' class for rows of this kind, without ``AutoModelFor``."""
        return "CausalLM"

    def input_kind(self, kind: str, *, text: bool) -> str:
        """What a model reads of rows of this kind: "image" for images; every other kind is read as tokens.

        Args:
            text: whether the architecture reads texts.
        """
        return kind

    def model_class(self, kind: str, path: Path | str, config: Any) -> tuple[Any, tuple[str, ...]]:
        """Transformers' class that loads the model from ``path``, and notices for the user.

        The method may complete the configuration; the model's fingerprint covers what it adds.

        Raises:
            InputError: the architecture does not fit the task.
        """
        import transformers

        return getattr(transformers, f"AutoModelFor{self.auto_class(kind)}"), ()

    def complete_tools(self, tools: Tools, path: Path | str, config: Any) -> Tools:
        """The tools with further preprocessors from the model's folder (or hub id), such as one for recordings.

        Raises:
            InputError: a preprocessor is missing, or cannot be read.
        """
        return tools

    def peft_type(self, kind: str) -> str | None:
        """PEFT's task type in an adapter's file, for rows of this kind; None if there is none."""
        return None

    def processor(self, path: Path | str, spec: ModelSpec, config: Any, tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
        """An object of the model's files that prepares the rows with this tokenizer, and notices for the user.

        It becomes ``processor`` of :class:`fedfm.models.preprocessors.Tools`, and is written into exports. It is None
        if the tokenizer is enough.

        Raises:
            InputError: the files have no such object, or the model does not fit the task.
        """
        return None, ()

    def fit_tokenizer(self, tokenizer: Any) -> tuple[str | None, tuple[str, ...]]:
        """Prepare a tokenizer to encode rows as the task's keys require.

        Returns:
            (template of :class:`fedfm.models.preprocessors.Tools`, notices for the user).

        Raises:
            InputError: the tokenizer cannot encode such rows.
        """
        return None, ()

    def fit_config(self, config: Any, name: str) -> None:
        """Set values in a model's configuration that the task needs; ``name`` names the model in messages.

        Raises:
            InputError: the model's architecture does not fit the task.
        """

    def check_tools(self, tools: Tools, name: str) -> None:
        """Refuse values of the task's keys that exceed a model's positions, or an image processor that does not fit.

        Raises:
            InputError: there is such a value or processor; the message says what would be right.
        """

    def check_outputs(self, name: str, found: Sequence[int], images: Sequence[int], classes: int) -> None:
        """Refuse outputs of a user's module that have another shape than the task needs.

        Args:
            name: the name of the function that made the module.
            found: shape of the outputs.
            images: shape of the images, (n, 3, H, W).
            classes: number of classes.

        Raises:
            InputError: the shape is wrong; the message says what would be right.
        """

    def check_single_encoder(self) -> None:
        """Refuse values of the task's keys that need a model of two encoders.

        Raises:
            InputError: there is such a value; the message says what would be right.
        """

    def answer_limit(self, tools: Tools) -> int:
        """Largest number of tokens of a generated answer: ``max_length``, but at most half of the model's positions."""
        return min(tools.max_length, (tools.positions or 2 * tools.max_length) // 2)

    def encode(self, model: Network, rows: Rows) -> Rows:
        """Add to the rows the outputs of frozen weights, which are computed only once per row."""
        return rows

    def prompts(self, rows: Rows) -> Rows:
        """The rows without their answers; rows that have no answers stay unchanged."""
        from fedfm.core.rows import Rows

        if "answer_start" not in rows.tensors or rows.tokens is None:
            return rows
        return Rows(tokens=rows.tokens.cut(rows.tensors["answer_start"].numpy()), pad=rows.pad)

    def logits(self, model: Network, batch: Batch) -> Tensor:
        """The model's outputs for a batch."""
        return model.outputs(batch)

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (m, C), float32, and targets (m,) of the cross-entropy; the target -100 does not count."""
        return logits.float(), batch["labels"].to(logits.device)

    def count_targets(self, batch: Batch) -> int:
        """The number of targets over which the loss of this batch is a mean."""
        return len(next(iter(batch.values())))

    def loss(self, model: Network, batch: Batch) -> Tensor:
        """The mean loss over the targets that count, a scalar; multiplied by :meth:`count_targets`, it is the sum."""
        return self.objective(*model.flat(model.logits(batch), batch))

    def objective(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits (m, C) and targets (m,), a scalar; the target -100 does not count."""
        import torch.nn.functional as F

        from fedfm.models.preprocessing import IGNORE

        return F.cross_entropy(logits, targets, ignore_index=IGNORE)

    def head_targets(self, rows: Rows, outputs: int) -> Tensor:
        """The vectors (n, C) that a linear head is fitted to by least squares: one-hot labels."""
        from torch.nn.functional import one_hot

        assert rows.labels is not None  # noqa: S101 - a task with a linear head has labels or overrides this
        return one_hot(rows.labels, outputs).float()

    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each row as (sums (b,), counts (b,)); total sum divided by total count is :meth:`loss`."""
        import torch.nn.functional as F

        from fedfm.models.preprocessing import IGNORE

        said, targets = model.flat(model.logits(batch), batch)
        rows = len(next(iter(batch.values())))
        each = F.cross_entropy(said, targets, ignore_index=IGNORE, reduction="none")
        return each.reshape(rows, -1).sum(1), (targets != IGNORE).reshape(rows, -1).sum(1)

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        """Logits of all rows without gradients, float32 on the CPU."""
        return model.in_batches(rows, batch_size)

    # --- scores -------------------------------------------------------------------------------------------------------
    def scores(self, model: Network, rows: Rows, batch_size: int = 64) -> Scores:
        """Scores of the model on the rows: ``n``, the :attr:`sums`, and the scores computed from them."""
        return self._scores_from(len(rows), self.count(model, rows, batch_size))

    def scores_of(self, model: Network, rows: Rows, logits: Tensor) -> Scores:
        """As :meth:`scores`, but from the rows' logits, which the caller has computed."""
        return self._scores_from(len(rows), self.count_of(model, rows, logits))

    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        """The sums over rows that :attr:`sums` names; {} if the rows cannot be scored."""
        return self.count_of(model, rows, model.predict(rows, batch_size)) if self.sums else {}

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        """As :meth:`count`, from the logits of these rows."""
        return {}

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        """The scores computed from these sums; a sum that is unknown or not finite is NaN."""
        return self.means_over_rows(sums)

    def means_over_rows(self, sums: Mapping[str, float]) -> Scores:
        """The scores of :attr:`row_means`."""
        return {score: mean(sums[name], sums["rows"]) for score, name in self.row_means.items()}

    def join_scores(self, parts: Sequence[Mapping[str, Any]]) -> Scores:
        """Scores on the union of several parts: the parts' sums are added. Parts without sums are left out.

        If only one part has sums, all its scores are kept, even scores that do not follow from sums.
        """
        from fedfm.models import metrics

        parts = [self._with_sums(part) for part in parts]
        known = [part for part in parts if part.get("n") and any(part.get(name) is not None for name in self.sums)]
        if not known:
            return metrics.nothing(sum(part.get("n") or 0 for part in parts))
        found = self._scores_from(sum(part["n"] for part in known), self.add_sums(known))
        return {**found, **known[0]} if len(known) == 1 else found

    def add_sums(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The sums of all parts together; NaN for a sum that a part lacks."""
        return add(parts, self.sums)

    def list_sizes(self, classes: Sequence[str]) -> dict[str, int]:
        """For each of :attr:`lists` with a fixed number of entries, this number."""
        return dict.fromkeys(self.lists, len(classes))

    def check_scores(self, scores: Mapping[str, Any], classes: Sequence[str]) -> None:
        """Check that scores and sums that a client sent can be those of some rows. Their types are right already.

        Raises:
            ClientFault: with E_FIELD if a list has a wrong number of entries, a sum is negative, or a share is not from
                0 to 1.
        """
        from fedfm.tasks import _score_checks

        positive = [name for name in self.sums if name not in self.row_means.values()]  # such means may have any sign
        _score_checks.check_numbers(scores, self.list_sizes(classes), positive)
        _score_checks.check_shares(scores, self.drawn, self.sums, self.figures_of)

    def with_chosen(self, chosen: Mapping[str, Mapping[str, float]], classes: Sequence[str]) -> Self:
        """The task with the values that a server chose by :meth:`choose` and sent in a message.

        Raises:
            ClientFault: with E_FIELD if the task does not choose such values.
        """
        if chosen:
            raise ClientFault(E_FIELD, f'chosen: the task "{self}" of this run chooses no key by validation rows')
        return self

    def choose(self, scores: Mapping[str, Any], classes: tuple[str, ...]) -> Mapping[str, Any]:
        """Values of the task's keys that follow from scores and sums on the validation rows of all clients.

        A run keeps them: its scores on test rows, predictions and exports use them.

        Returns:
            For each key, the value of each class; empty if there is nothing to choose, or too little is known.
        """
        return {}

    def _with_sums(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the sums that a silo does not send; they follow from the scores that it sends."""
        n, means = scores.get("n"), {key: scores.get(key) for key in self.row_means}
        if not n or all(value is None for value in means.values()):
            return scores
        made = {self.row_means[key]: None if value is None else n * value for key, value in means.items()}
        return {"rows": n, **finite(made), **scores}

    def figures_of(self, sums: Mapping[str, Any]) -> Scores:
        """The scores computed from these sums; None for a score that is unknown or not finite."""
        return finite(self.from_sums(numbers(sums, self.sums)))

    def _scores_from(self, n: int, sums: Mapping[str, Any]) -> Scores:
        from fedfm.models import metrics

        if not sums:
            return metrics.nothing(n)
        return metrics.nothing(n) | finite(sums) | self.figures_of(sums)

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        """Notices after a run about its figures: what limits them, and how to improve them."""
        return []

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        """The output of ``fedfm predict``: lists by name, with one entry per row, and figures over all rows."""
        import torch

        model = trained.model
        rows = trained.encode(model.prepare(table, range(len(table))))
        probabilities = torch.softmax(trained.logits(rows), 1)
        return {
            "classes": list(model.classes),
            "predictions": [model.classes[i] for i in probabilities.argmax(1).tolist()],
            "probabilities": [[round(p, 6) for p in row] for row in probabilities.tolist()],
        }

    def generation_settings(self, model: Network) -> dict[str, Any]:
        """Values for ``generation_config.json``, so that an export generates the answers of ``fedfm predict``."""
        return {}

    def for_export(self, model: Network, w: Params) -> tuple[Self, Params]:
        """The task and the weights for an export. The weights differ from the run's where other programs need it."""
        return self, w

    def add_files(self, model: Network, to: str, folder: Path) -> None:
        """Add the files with which other libraries load an export in the format ``to``."""

    def about_outputs(self) -> str:
        """A sentence for the reader of an export about the model's outputs; empty if there is nothing to say."""
        return ""

    def about_export(self, to: str, folder: Path) -> str:
        """The README's text after the code that loads an export of format ``to``; by default :meth:`about_outputs`."""
        return self.about_outputs()

    def tables(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[FigureTable]:
        """A report's tables of the task's own scores; ``figures`` are the ``details`` of the result."""
        return []

    def plots(self, figures: Mapping[str, Any], classes: Sequence[str]) -> list[Groups]:
        """A report's plots of predicted values against true values; ``figures`` are the ``details`` of the result."""
        return []

    def pictures(self, trained: Trained, table: Table) -> RowPictures | None:
        """Pictures of these rows with targets and predictions, for ``fedfm report --rows``; None if there are none."""
        return None

    def pipeline(self, kind: str) -> str | None:
        """The hub's pipeline tag of an export for rows of this kind; None if there is none."""
        return {"image": "image-classification", "text": "text-classification"}.get(kind)

    def pipeline_of(self, model: Network, kind: str) -> str | None:
        """As :meth:`pipeline`, for a task whose models of one kind of rows differ."""
        return self.pipeline(kind)

    def describe(self, model: Network) -> dict[str, Any]:
        """The task's entries in ``fedfm.json`` of an export."""
        return {"task": self.name}


if TYPE_CHECKING:
    _HAS_ALL_MEMBERS: type[ModelTask] = Task  # the members that packages below this one use
