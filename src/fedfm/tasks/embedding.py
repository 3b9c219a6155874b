"""Embedding: pairs of texts or of images that belong together get vectors with a large cosine similarity.

The loss is sentence-transformers' MultipleNegativesRankingLoss: an anchor has to find its positive among the positives
(and negatives) of its batch. :mod:`fedfm.tasks._pair_rows` reads the rows, :mod:`fedfm.tasks._pair_vectors` computes
vectors and the loss, and :mod:`fedfm.tasks._pair_candidates` ranks candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks.task import LORA, Column, Reading, RowKind, Sums, Task, Trained

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from fedfm.core.rows import Batch, Rows
    from fedfm.data.sources._sheet import Sheet
    from fedfm.data.spec import DataSpec
    from fedfm.data.table import Table
    from fedfm.models.network import Network
    from fedfm.models.preprocessors import Tools


@dataclass(frozen=True)
class Embedding(Task):
    """An encoder without a head. A row is (anchor, positive) or (anchor, positive, negative).

    Logits of a batch are (b, m): the cosines between its b anchors and its m positives and negatives, divided by the
    temperature. :meth:`predict` compares each anchor with the candidates of a fixed set instead, so that the anchor's
    logits do not depend on its batch.
    """

    name: ClassVar[str] = "embedding"
    kinds: ClassVar[tuple[str, ...]] = ("pairs",)
    own_kind: ClassVar[RowKind | None] = RowKind("pairs", "pairs")
    implied_by: ClassVar[tuple[str, ...]] = ("pairs",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("anchor", 'column of the anchors, texts or images, task "embedding"', files="image"),
        Column("positive", 'column of what belongs to each anchor, task "embedding"'),
        Column("negative", 'optional column of what does not belong to the anchor, task "embedding"'),
    )
    no_pretraining: ClassVar[str] = "it trains an encoder that has weights; expected another task"
    softmax: ClassVar[bool] = False
    texts_a_row: ClassVar[int] = 2
    adaptations: ClassVar[tuple[str, ...]] = ("full", "top_layers", *LORA)
    figures: ClassVar[tuple[str, ...]] = ("recall_at_1", "recall_at_5", "mrr", "ndcg")
    drawn: ClassVar[tuple[str, ...]] = figures
    row_means: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "loss": "loss_of_rows",
            "recall_at_1": "right",
            "recall_at_5": "in_first_5",
            "mrr": "reciprocal_ranks",
            "ndcg": "gains",
            "accuracy": "right",
        }
    )
    sums: ClassVar[tuple[str, ...]] = ("rows", *dict.fromkeys(row_means.values()))

    temperature: float = setting(
        0.05,
        "embedding: cosines are divided by it; scale = 1 / temperature in sentence-transformers",
        gt=0,
        finite=True,
    )
    candidates: int = setting(
        100, "embedding: largest number of rows in a set of rows whose positives are ranked together", ge=2
    )

    @property
    def mixes_rows(self) -> str:
        return "a contrastive loss compares the rows of a batch with each other"

    # --- rows ---------------------------------------------------------------------------------------------------------
    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("anchor") in columns and spec.column("positive") in columns

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _pair_rows

        return _pair_rows.read(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        from fedfm.tasks import _pair_rows

        return _pair_rows.shuffle(rows, rng)

    def part(self, table: Table, index: np.ndarray) -> Table:
        from fedfm.tasks import _pair_candidates

        return _pair_candidates.part(table, index, self.candidates)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.tasks import _pair_candidates, _pair_rows

        return _pair_candidates.with_table(_pair_rows.to_rows(part, tools), part, tools)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _pair_notices

        return _pair_notices.forewarnings(parts, tools, self.candidates)

    # --- model --------------------------------------------------------------------------------------------------------
    def input_kind(self, kind: str, *, text: bool) -> str:
        return "text" if text else "image"

    def auto_class(self, kind: str) -> str:
        return ""

    def model_class(self, kind: str, path: Path | str, config: Any) -> tuple[Any, tuple[str, ...]]:
        from fedfm.tasks import _encoders

        return _encoders.find(path, config)

    def peft_type(self, kind: str) -> str | None:
        return "FEATURE_EXTRACTION"

    def logits(self, model: Network, batch: Batch) -> Tensor:
        from fedfm.tasks import _pair_vectors

        return _pair_vectors.logits(model, batch, self.temperature)

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        import torch

        return logits.float(), torch.arange(len(logits), device=logits.device)

    def row_losses(self, model: Network, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.errors import InputError

        raise InputError(f"a row has no loss of its own: {self.mixes_rows}")

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        from fedfm.tasks import _pair_candidates

        return _pair_candidates.similarities(model, rows, batch_size, self.temperature)

    # --- scores -------------------------------------------------------------------------------------------------------
    def count_of(self, model: Network, rows: Rows, logits: Tensor) -> Sums:
        from fedfm.tasks import _pair_candidates

        return _pair_candidates.count(logits, rows)

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        rows = f"a fixed set of at most {self.candidates} rows of its file (model.candidates)"
        return [f"recall, MRR and nDCG rank each row's positive among the positives and negatives of {rows}"]

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _pair_notices, _pair_vectors

        cut = _pair_notices.cut_texts({"given": table}, trained.model.tools)
        return _pair_vectors.answer(trained, table) | {"warnings": cut}

    def about_export(self, to: str, folder: Path) -> str:
        from fedfm.tasks import _encoders

        return _encoders.about_export(to, folder)

    def add_files(self, model: Network, to: str, folder: Path) -> None:
        from fedfm.tasks import _encoders

        _encoders.add_files(model, to, folder)

    def describe(self, model: Network) -> dict[str, Any]:
        from fedfm.tasks._encoders import pooling_of

        return {"task": self.name, "pooling": asdict(pooling_of(model))}

    def pipeline(self, kind: str) -> str | None:
        return "feature-extraction"
