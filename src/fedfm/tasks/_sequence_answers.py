"""Generate answers with encoder-decoders, and compare them with the rows' outputs.

This is the only module that imports jiwer; the extra ``seq2seq`` installs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Batch, Rows, blank
from fedfm.data.table import Table
from fedfm.errors import InputError, MissingExtra
from fedfm.models.memory_budget import by_tokens, in_halves, warn
from fedfm.models.precision import reduced_precision
from fedfm.models.preprocessing import LOCAL_SHARE
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet
from fedfm.models.text_metrics import Answer, compare_texts, of_answers, of_tokens, sum_tokens
from fedfm.models.trained import Scores, Trained
from fedfm.tasks import _languages, _sequence_rows
from fedfm.tasks._sums import mean

if TYPE_CHECKING:
    from fedfm.models.network import Network

_LOGITS = 1 << 26  # largest number of logits of a batch in evaluation, 256 MB


def _jiwer() -> Any:
    try:
        return importlib.import_module("jiwer")
    except ImportError:
        raise MissingExtra(
            'the word error rate needs jiwer: pip install "fedfm[seq2seq]"; without it set model.answer_tokens = 0: '
            "then test rows give only the loss"
        ) from None


def check(tools: Tools, name: str, asked: int | None) -> None:
    """Refuse an answer limit above the decoder's positions, and generation without the library that scores answers.

    Raises:
        InputError: the limit is too large.
        MissingExtra: jiwer is not installed, and answers are generated.
    """
    if asked != 0:
        _jiwer()
    if tools.positions and asked is not None and asked >= tools.positions:
        raise InputError(
            f"model.answer_tokens = {asked}: the decoder of {name!r} has {tools.positions} positions; expected at most "
            f"{tools.positions - 1}",
            key="model.answer_tokens",
        )


# --- likelihood -------------------------------------------------------------------------------------------------------


def count(model: Network, rows: Rows, batch_size: int, *, generated: bool) -> dict[str, float]:
    """The sums over the outputs' tokens and over the answers; if ``generated`` is False, there are no answers."""
    said = answers(model, rows) if generated else []
    return {**_count_tokens(model, rows, batch_size), **compare(said, [str(output) for _, output in rows.pairs or ()])}


def _size(model: Network, rows: Rows, most: int) -> int:
    """The number of rows in a batch, from the lengths of inputs and outputs and from the width of the logits."""
    wide, head = rows.tensors["targets"].shape[1], model.last_layer
    most = by_tokens(max(rows.longest, wide, _frames(rows)), most)
    return most if head is None else by_tokens(wide, most, head.out_features, _LOGITS)


def _frames(rows: Rows) -> int:
    """The encoder's number of positions for a recording; 0 for texts."""
    features = rows.tensors.get("input_features")
    if features is not None:
        return features.shape[-1] // 2
    return 1500 if "input_features" in rows.deferred else 0


def _count_tokens(model: Network, rows: Rows, batch_size: int) -> dict[str, float]:
    def predict(batch: Batch) -> tuple[Tensor, Tensor]:
        return model.flat(model.logits(batch), batch)

    return sum_tokens(model, rows, _size(model, rows, batch_size), predict)


def logits(model: Network, rows: Rows, batch_size: int) -> Tensor:
    """Logits (n, longest output, V) of all rows, float32 on the CPU; zeros after a batch's longest output."""
    wide, done = rows.tensors["targets"].shape[1], list[Tensor]()
    with model.evaluating():
        for batch in rows.batches(_size(model, rows, batch_size)):
            of = model.logits(batch).float().cpu()  # (b, L, V)
            done.append(F.pad(of, (0, 0, 0, wide - of.shape[1])))
    return torch.cat(done) if done else torch.zeros(0, wide, 0)


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(model: Network, rows: Rows, batch_size: int = 64) -> list[Answer]:
    """The model's greedy answers; they do not depend on the rows' outputs.

    Rows of similar length share a batch. A row gets the same answer alone and in a batch, unless two tokens have equal
    logits up to rounding.
    """
    settings = model.task.generation_settings(model)  # type: ignore[attr-defined]
    config, ends = _languages.greedy_settings(model, settings), _languages.ends(model)
    generate: Any = getattr(model.module, "generate")  # noqa: B009  (a method that only generating models have)
    share = rows.tensors.get(LOCAL_SHARE)
    lengths = [0] * len(rows) if rows.tokens is None else rows.tokens.length.tolist()
    order = sorted(range(len(rows)), key=lengths.__getitem__)
    out = [Answer((), "", False)] * len(rows)
    given = ("input_ids", "attention_mask", "input_features", *rows.token_arguments)

    def answer(some: list[int], size: int) -> None:
        for at in range(0, len(some), size):
            part = some[at : at + size]
            batch = rows.batch(part)
            model.share = None if share is None else share[part]
            inputs = _languages.to_device(model, {name: of for name, of in batch.items() if name in given})
            said = generate(**inputs, generation_config=config)
            for i, ids in zip(part, said.tolist(), strict=True):
                out[i] = _answer(ids, ends, model, config)

    longest = max(rows.longest, _frames(rows), _languages.limit(model))
    size = 1 if _reads_padding(config) else by_tokens(longest, batch_size)
    with quiet(), torch.no_grad(), model.evaluating(), reduced_precision(model.spec.dtype, model.device):
        for at in range(0, len(order), size):
            in_halves(size, partial(answer, order[at : at + size]), warn)
    model.share = None
    return out


def _reads_padding(config: Any) -> bool:
    """Whether a setting treats padding as a part of the inputs, so that each row needs a batch of its own."""
    penalty, size = config.encoder_repetition_penalty, config.encoder_no_repeat_ngram_size
    return penalty not in (None, 1) or bool(size)


def _answer(ids: Sequence[int], ends: set[int], model: Network, config: Any) -> Answer:
    """The answer in a generated sequence.

    The first token starts the decoder, and is not part of the answer. The sequence of a Whisper has neither the tokens
    before the answer nor the end token. If the settings force an end at the limit, answers that end there count as cut.
    """
    spoken = model.tools.processor is not None
    begin, stops = (0, {*ends, config.pad_token_id}) if spoken else (1, ends)
    at = next((i for i, token in enumerate(ids) if i >= begin and token in stops), len(ids))
    limit = config.max_new_tokens if spoken or config.forced_eos_token_id is not None else len(ids)
    text = model.tools.tokenizer.decode(ids[begin:at], skip_special_tokens=True)
    return Answer(tuple(ids[: at + 1]), text, cut=at >= limit)


# --- scores -----------------------------------------------------------------------------------------------------------


def compare(said: Sequence[Answer], right: Sequence[str]) -> dict[str, float]:
    """The sums of :func:`fedfm.models.text_metrics.compare_texts`, of word errors, and of words in the outputs.

    White space separates words; case and punctuation count.
    """
    errors, words = 0, 0
    if said:
        texts = [" ".join(answer.text.split()) for answer in said]
        found = _jiwer().process_words([" ".join(text.split()) for text in right], texts)
        errors = found.substitutions + found.deletions + found.insertions
        words = found.substitutions + found.deletions + found.hits
    return {**compare_texts(said, right), "word_errors": errors, "reference_words": words}


def scores(sums: Mapping[str, float]) -> Scores:
    """``loss`` and ``perplexity`` of tokens; ``accuracy`` (exact match), ``rouge_1``, ``wer``, ``answers_cut``."""
    found = of_answers(sums)
    exact = found.pop("exact_match")
    return {**of_tokens(sums), **found, "accuracy": exact, "wer": mean(sums["word_errors"], sums["reference_words"])}


def remarks(figures: Mapping[str, Any]) -> list[str]:
    """A notice about answers that end at the limit of tokens."""
    cut = max(figures.get(key) or 0.0 for key in ("answers_cut", "local_answers_cut"))
    if not cut:
        return []
    return [
        f"{cut:.0%} of the answers to test rows are cut at the limit of tokens; a larger model.answer_tokens makes "
        "room for them"
    ]


def answer(trained: Trained, table: Table) -> dict[str, Any]:
    """The answer to each row, and scores on the rows that have an output."""
    model = trained.model
    with trained.apply(model.prepare(table, range(len(table)))) as rows:
        given = answers(model, rows)
    known = [i for i, (_, output) in enumerate(table.inputs) if not blank(output)]
    sums = compare([given[i] for i in known], [table.inputs[i][1] for i in known])
    with trained.apply(model.prepare(table, known)) as rows:
        found = scores({**sums, **_count_tokens(model, rows, 64)})
    return {
        "predictions": [],
        "probabilities": [],
        "warnings": _sequence_rows.forewarnings({"given": table}, model.tools),
        "answers": [of.text for of in given],
        "cut": [i for i, of in enumerate(given) if of.cut],
        "answer_tokens": _languages.limit(model),
        "exact_match": found["accuracy"],
        **{key: found[key] for key in ("rouge_1", "wer", "loss", "perplexity")},
    }
