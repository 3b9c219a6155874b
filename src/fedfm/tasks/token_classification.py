"""Token classification: each word of a list gets a tag, such as person or place.

:mod:`fedfm.tasks._tagged_rows` reads the rows, :mod:`fedfm.tasks._tags` finds the entities, and
:mod:`fedfm.tasks._tagged_scores` counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks._sums import mean
from fedfm.tasks.task import LORA, Column, Reading, RowKind, Scores, Sums, Task, Trained

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools

_IGNORE = -100  # the target that the loss ignores


@dataclass(frozen=True)
class TokenClassification(Task):
    """A new head gives each token a tag; a word has the tag of its first token."""

    name: ClassVar[str] = "token_classification"
    kinds: ClassVar[tuple[str, ...]] = ("tagged",)
    own_kind: ClassVar[RowKind | None] = RowKind("tagged", "words with tags", inputs=1)
    implied_by: ClassVar[tuple[str, ...]] = ("tagged",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("tokens", 'column of the words, each row a list, task "token_classification"'),
        Column("tags", 'column of the tags, each row a list, one tag for each word, task "token_classification"'),
    )
    endings: ClassVar[tuple[str, ...]] = (".conll", ".bio", ".iob", ".iob2", ".bioes")
    new_head: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    class_word: ClassVar[str] = "tag"
    means_over_tokens: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    adaptations: ClassVar[tuple[str, ...]] = ("full", "top_layers", *LORA)
    figures: ClassVar[tuple[str, ...]] = ("precision", "recall", "f1")
    drawn: ClassVar[tuple[str, ...]] = ("f1",)
    sums: ClassVar[tuple[str, ...]] = ("words", "right_tags", "loss_of_words", "entities", "found", "right_entities")

    # --- rows ---------------------------------------------------------------------------------------------------------
    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("tokens") in columns and spec.column("tags") in columns

    def sheet(self, text: str, source: str) -> Sheet:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.sheet_of(text, source)

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.read(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.shuffle(rows, rng)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.to_rows(part, tools, classes)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.forewarnings(parts, tools)

    def target_groups(self, classes: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """The tags; a row may have all of them; see :class:`fedfm.tasks._row_survey.TargetGroups`."""
        return tuple(classes), len(classes)

    def group_members(self, table: Table, classes: Sequence[str]) -> np.ndarray:
        """Whether each row has a word with each tag (n, C)."""
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.presence(table, classes)

    # --- model --------------------------------------------------------------------------------------------------------
    def auto_class(self, kind: str) -> str:
        return "TokenClassification"

    def peft_type(self, kind: str) -> str | None:
        return "TOKEN_CLS"

    def pipeline(self, kind: str) -> str | None:
        return "token-classification"

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["targets"][:, : logits.shape[1]].to(logits.device)  # (b, L)
        return logits.float().flatten(0, 1), targets.flatten()  # (b L, C), (b L,)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["targets"] != _IGNORE).sum())

    def loss(self, model: Network, batch: Batch) -> Tensor:
        if self.count_targets(batch):
            return super().loss(model, batch)
        return model.logits(batch).float().sum() * 0.0  # no word of these rows has a token

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        return model.in_batches(rows.to_padded(), batch_size)

    # --- scores -------------------------------------------------------------------------------------------------------
    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        from fedfm.tasks import _tagged_scores

        return _tagged_scores.count(model, rows, batch_size, self.sums)

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        from fedfm.tasks import _tagged_scores

        return _tagged_scores.count_of(rows, logits, model.classes, self.sums)

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        from fedfm.tasks._tags import scores_of_entities

        words, right = sums["words"], sums["right_entities"]
        return {
            "accuracy": mean(sums["right_tags"], words),
            "loss": mean(sums["loss_of_words"], words),
            **scores_of_entities(sums["entities"], sums["found"], right, words > 0),
        }

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _tagged_scores

        return _tagged_scores.answer(trained, table)
