"""Language modelling: a causal language model continues running text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.tasks._language import LanguageTask, answer_passages
from fedfm.tasks.task import RowKind, Trained

if TYPE_CHECKING:
    import numpy as np

    from fedfm.core.rows import Rows
    from fedfm.data.table import Table
    from fedfm.models.preprocessors import Tools


@dataclass(frozen=True)
class LanguageModelling(LanguageTask):
    """Texts are joined and cut into blocks; the model predicts every token of a block."""

    name: ClassVar[str] = "language_modelling"
    kinds: ClassVar[tuple[str, ...]] = ("passages", "text")
    own_kind: ClassVar[RowKind | None] = RowKind("passages", "running text", joined=True, wording=False)
    implied_by: ClassVar[tuple[str, ...]] = ("passages",)
    means_over_tokens: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True

    def packs(self, kind: str) -> bool:
        return kind in self.kinds

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """Permute the words within each passage."""
        return replace(rows, inputs=[" ".join(rng.permutation(text.split()).tolist()) for text in rows.inputs])

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.core.rows import Rows
        from fedfm.models.language import encoding

        tokens = encoding.passages(list(part.inputs), tools.tokenizer, tools.max_length)
        return Rows(tokens=tokens, pad=int(tools.tokenizer.pad_token_id or 0))

    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        """The loss and the perplexity of the text."""
        return answer_passages(trained, table)
