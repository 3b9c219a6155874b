"""Token classification: each word of a list gets a tag, such as person or place.

:mod:`fedfm.tasks._tagged_rows` reads the rows, :mod:`fedfm.tasks._tags` finds the entities and scores them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
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

Figures = dict[str, float]

_IGNORE = -100  # the target that does not count
_AT_ONCE = 256  # number of rows whose logits are in memory together


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
        tags = [tag for _, of in rows.inputs for tag in of]
        mixed = [tags[i] for i in rng.permutation(len(tags))]
        ends = list(accumulate(len(of) for _, of in rows.inputs))
        inputs = [
            (words, tuple(mixed[end - len(of) : end])) for (words, of), end in zip(rows.inputs, ends, strict=True)
        ]
        return replace(rows, inputs=inputs)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        import torch

        from fedfm.core.rows import Rows
        from fedfm.errors import InputError
        from fedfm.models import word_tokens

        code = {tag: i for i, tag in enumerate(classes)}
        if unknown := sorted({tag for _, of in part.inputs for tag in of} - code.keys()):
            raise InputError(f"{part.source or 'the data'}: tag {unknown[0]!r} is none of the model's classes")
        pieces = word_tokens.of([words for words, _ in part.inputs], tools)
        longest = int(pieces.tokens.length.max(initial=0))
        targets = torch.full((len(part), longest), _IGNORE)  # (n, L)
        for i, ((_, of), place) in enumerate(zip(part.inputs, pieces.places, strict=True)):
            for word, at in place.items():
                targets[i, at] = code[of[word]] if of else 0  # without tags, 0 marks the place of a word
        pad = int(tools.tokenizer.pad_token_id or 0)
        return Rows({"targets": targets}, tokens=pieces.tokens, pad=pad, token_arguments=pieces.token_arguments)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _tagged_rows

        return _tagged_rows.forewarnings(parts, tools)

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
        total: Figures = dict.fromkeys(self.sums, 0)
        for part in _parts(rows):
            for name, value in self._counts(part, model.predict(part, batch_size), model.classes).items():
                total[name] += value
        return total

    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        return self._counts(rows, logits, model.classes)

    def _counts(self, rows: Rows, logits: Tensor, classes: tuple[str, ...]) -> Figures:
        """The sums of rows with logits (n, L, C)."""
        import torch.nn.functional as F

        from fedfm.tasks._tags import spans

        targets = rows.tensors["targets"][:, : logits.shape[1]]  # (n, L)
        counts = targets != _IGNORE
        said = logits.argmax(-1)
        total: Figures = dict.fromkeys(self.sums, 0)
        for i in range(len(rows)):
            right = spans([classes[tag] for tag in targets[i][counts[i]].tolist()])
            found = spans([classes[tag] for tag in said[i][counts[i]].tolist()])
            total["entities"] += len(right)
            total["found"] += len(found)
            total["right_entities"] += len({*right} & {*found})
        total["words"] = int(counts.sum())
        total["right_tags"] = int((said == targets)[counts].sum())
        total["loss_of_words"] = float(F.cross_entropy(logits[counts].double(), targets[counts], reduction="sum"))
        return total

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
        from fedfm.models import word_tokens
        from fedfm.tasks._tags import OUTSIDE, entity, spans

        model, warnings = trained.model, list[str]()
        tags: list[list[str | None]] = []
        entities: list[list[dict[str, Any]]] = []
        for start in range(0, len(table), _AT_ONCE):
            part = table.take(range(start, min(start + _AT_ONCE, len(table))))
            rows = trained.encode(model.prepare(part, range(len(part))))
            said = trained.logits(rows).argmax(-1)  # (n, L)
            sentences = [words for words, _ in part.inputs]
            for i, (words, place) in enumerate(
                zip(sentences, word_tokens.of(sentences, model.tools).places, strict=True)
            ):
                of = [model.classes[int(said[i, place[w]])] if w in place else None for w in range(len(words))]
                tags.append(of)
                # A word that is cut off ends the entity before it.
                entities.append([entity(words, span) for span in spans([tag or OUTSIDE for tag in of])])
        if cut := sum(of.count(None) for of in tags):
            warnings.append(
                f"{cut} words have no token among the first {model.tools.max_length} of their rows (model.max_length): "
                "their tag is null"
            )
        return {"tags": tags, "entities": entities, "words_cut": cut, "warnings": warnings}


def _parts(rows: Rows) -> Iterator[Rows]:
    """The rows in parts whose logits fit into memory."""
    return (rows.take(range(i, min(i + _AT_ONCE, len(rows)))) for i in range(0, len(rows), _AT_ONCE))
