"""Instruction: a causal language model learns answers to instructions, or the last answers of conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks._answers import ADDITIONS, INSTRUCTIONS, MESSAGES, AnswerTask
from fedfm.tasks._language import LanguageTask
from fedfm.tasks.task import Column, Reading, RowKind, Scores, Sums

if TYPE_CHECKING:
    import numpy as np

    from fedfm.core.rows import Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools


@dataclass(frozen=True)
class Instruction(AnswerTask):
    """A row is (instruction, answer); the loss is a mean over the answers' tokens."""

    name: ClassVar[str] = "instruction"
    kinds: ClassVar[tuple[str, ...]] = ("instruction",)
    own_kind: ClassVar[RowKind | None] = RowKind("instruction", "instructions", answered=True)
    implied_by: ClassVar[tuple[str, ...]] = ("instruction",)
    columns: ClassVar[tuple[Column, ...]] = (
        *INSTRUCTIONS,
        Column("output", 'output column of task "instruction"'),
        MESSAGES,
        *ADDITIONS,
    )
    means_over_tokens: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    figures: ClassVar[tuple[str, ...]] = ("rouge_1", "answers_cut")
    sums: ClassVar[tuple[str, ...]] = (
        *LanguageTask.sums,
        *("answers", "exact_answers", "rouge_of_answers", "cut_answers"),
    )

    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        if spec.column("instruction") in columns:
            return True
        return spec.column("messages") in columns and spec.column("images") not in columns

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _conversation_rows

        return _conversation_rows.instructions(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """Permute the answers among the instructions."""
        order = rng.permutation(len(rows)).tolist()
        return replace(rows, inputs=[(rows.inputs[i][0], rows.inputs[j][1]) for i, j in enumerate(order)])

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.core.rows import Rows
        from fedfm.models.language import encoding

        tokens, where = encoding.instructions(part.inputs, tools.tokenizer, tools.max_length, tools.template)
        return Rows(where, tokens=tokens, pad=int(tools.tokenizer.pad_token_id or 0), pairs=tuple(part.inputs))

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.models import lost_words

        return lost_words.changed_outputs(parts, tools.tokenizer)

    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        """Sums over the answers' tokens, and over the answers that the model generates."""
        from fedfm.models.text_metrics import compare_texts, references

        said = self.generate(model, rows) if self.answer_tokens != 0 else []
        return {**super().count(model, rows, batch_size), **compare_texts(said, references(model, rows))}

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        """``loss`` and ``perplexity`` of the answers' tokens; ``accuracy`` is the exact match of answers."""
        from fedfm.models.text_metrics import of_answers

        found = of_answers(sums)
        return super().from_sums(sums) | found | {"accuracy": found["exact_match"]}

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        cut = max(figures.get(key) or 0.0 for key in ("answers_cut", "local_answers_cut"))
        if not cut:
            return []
        return [
            f"{cut:.0%} of the answers to test rows are cut at the limit of tokens; a larger model.answer_tokens "
            "makes room for them"
        ]
