"""Sequence to sequence: an encoder-decoder turns a text or a recording into a text.

:mod:`fedfm.tasks._sequence_rows` reads the rows, :mod:`fedfm.tasks._recordings` decodes recordings,
:mod:`fedfm.tasks._languages` chooses languages, and :mod:`fedfm.tasks._sequence_answers` generates and scores answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fedfm.core.fields import setting
from fedfm.tasks.task import Column, Reading, RowKind, Scores, Sums, Task, Trained

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

_IGNORE = -100  # the target that the loss ignores


@dataclass(frozen=True)
class SequenceToSequence(Task):
    """A row is (text or recording, output); the loss is a mean over the output's tokens, as in Seq2SeqTrainer."""

    name: ClassVar[str] = "sequence_to_sequence"
    kinds: ClassVar[tuple[str, ...]] = ("sequences",)
    own_kind: ClassVar[RowKind | None] = RowKind("sequences", "texts or recordings with an output each", inputs=1)
    implied_by: ClassVar[tuple[str, ...]] = ("sequences",)
    columns: ClassVar[tuple[Column, ...]] = (
        Column("instruction", 'column of the input texts, task "sequence_to_sequence"'),
        Column("output", 'column of the output texts, task "sequence_to_sequence"'),
        Column("audio", 'column of recordings (paths, or contents), task "sequence_to_sequence"', files="recording"),
    )
    means_over_tokens: ClassVar[bool] = True
    softmax: ClassVar[bool] = True
    compared_by_row: ClassVar[bool] = True
    no_pretraining: ClassVar[str] = "it makes causal models, and this task needs an encoder and a decoder"
    figures: ClassVar[tuple[str, ...]] = ("rouge_1", "wer", "answers_cut")
    drawn: ClassVar[tuple[str, ...]] = ("rouge_1",)  # a word error rate may exceed 1
    sums: ClassVar[tuple[str, ...]] = (
        *("tokens", "right_tokens", "loss_of_tokens"),
        *("answers", "exact_answers", "rouge_of_answers", "cut_answers", "word_errors", "reference_words"),
    )

    answer_tokens: int | None = setting(
        None,
        "instruction, preference, sequence_to_sequence: largest number of tokens of an answer [max_length, at most "
        "half of a causal model's positions]; with 0, none are generated for test rows, which give only the loss",
        ge=0,
    )
    source_language: str | None = setting(
        None,
        "sequence_to_sequence: code of the input's language, for a model of several languages (mBART, NLLB, Whisper)",
    )
    target_language: str | None = setting(
        None,
        "sequence_to_sequence: code of the output's language, for a model that translates; a Whisper translates to "
        "English alone",
    )

    @property
    def generates(self) -> bool:
        return True

    # --- rows ---------------------------------------------------------------------------------------------------------
    def claims(self, columns: Mapping[str, Any], spec: DataSpec) -> bool:
        return spec.column("audio") in columns and spec.column("output") in columns

    def read(self, sheet: Sheet, spec: DataSpec, *, source: str, labelled: bool) -> Reading:
        from fedfm.tasks import _sequence_rows

        return _sequence_rows.read(sheet, spec, source, labelled)

    def shuffle_targets(self, rows: Table, rng: np.random.Generator) -> Table:
        """Permute the outputs among the inputs."""
        from fedfm.tasks import _sequence_rows

        return _sequence_rows.shuffle(rows, rng)

    def rows(self, part: Table, tools: Tools, classes: tuple[str, ...]) -> Rows:
        from fedfm.tasks import _sequence_rows

        return _sequence_rows.to_rows(part, tools)

    def forewarnings(self, parts: Mapping[str, Table], tools: Tools) -> list[str]:
        from fedfm.tasks import _sequence_rows

        return _sequence_rows.forewarnings(parts, tools)

    # --- model --------------------------------------------------------------------------------------------------------
    def model_class(self, kind: str, path: Path | str, config: Any) -> tuple[Any, tuple[str, ...]]:
        from fedfm.tasks import _languages

        return _languages.model_class(config), ()

    def complete_tools(self, tools: Tools, path: Path | str, config: Any) -> Tools:
        from fedfm.tasks import _languages

        return _languages.complete(tools, path, config, self.source_language, self.target_language)

    def check_tools(self, tools: Tools, name: str) -> None:
        from fedfm.tasks import _sequence_answers

        _sequence_answers.check(tools, name, self.answer_tokens)

    def answer_limit(self, tools: Tools) -> int:
        return self.answer_tokens or min(tools.max_length, tools.positions or tools.max_length)

    def generation_settings(self, model: Network) -> dict[str, Any]:
        from fedfm.tasks import _languages

        return _languages.generation_settings(model, self.source_language, self.target_language)

    def peft_type(self, kind: str) -> str | None:
        return None if kind == "audio" else "SEQ_2_SEQ_LM"  # PEFT's class of this type gives a Whisper token ids

    def logits(self, model: Network, batch: Batch) -> Tensor:
        """Logits (b, L, V) of the output's tokens; to predict a token, the decoder reads the tokens before it."""
        from fedfm.tasks import _sequence_rows

        targets = _sequence_rows.targets_of(batch)  # (b, L)
        shifted = _sequence_rows.shift(model.module, targets)
        return model.outputs({**batch, "decoder_input_ids": shifted})

    def targets(self, model: Network, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        from fedfm.tasks import _sequence_rows

        targets = _sequence_rows.targets_of(batch).to(logits.device)  # (b, L)
        return logits.float().flatten(0, 1), targets.flatten()  # (b L, V), (b L,)

    def count_targets(self, batch: Batch) -> int:
        return int((batch["targets"] != _IGNORE).sum())

    def predict(self, model: Network, rows: Rows, batch_size: int) -> Tensor:
        from fedfm.tasks import _sequence_answers

        return _sequence_answers.logits(model, rows, batch_size)

    # --- scores -------------------------------------------------------------------------------------------------------
    def count(self, model: Network, rows: Rows, batch_size: int = 64) -> Sums:
        """Sums over the outputs' tokens, and over the answers that the model generates."""
        from fedfm.tasks import _sequence_answers

        return _sequence_answers.count(model, rows, batch_size, generated=self.answer_tokens != 0)

    def from_sums(self, sums: Mapping[str, float]) -> Scores:
        """``loss`` and ``perplexity`` of the outputs' tokens; ``accuracy`` is the exact match of answers."""
        from fedfm.tasks import _sequence_answers

        return _sequence_answers.scores(sums)

    def remarks(self, figures: Mapping[str, Any]) -> list[str]:
        from fedfm.tasks import _sequence_answers

        return _sequence_answers.remarks(figures)

    # --- results ------------------------------------------------------------------------------------------------------
    def answer(self, trained: Trained, table: Table) -> dict[str, Any]:
        from fedfm.tasks import _sequence_answers

        return _sequence_answers.answer(trained, table)

    def about_outputs(self) -> str:
        return (
            "`model.generate(..., do_sample=False, num_beams=1)` gives the answers of `fedfm predict` by the other "
            "settings in `generation_config.json`, and `tokenizer.batch_decode(..., skip_special_tokens=True)` turns "
            "them into texts."
        )

    def pipeline_of(self, model: Network, kind: str) -> str | None:
        return "text2text-generation" if model.tools.processor is None else "automatic-speech-recognition"
