"""Scores of language models on rows: the likelihood of tokens, and answers against references."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.core.rows import Asked, Batch, Output, Rows, has_tools
from fedfm.errors import InputError
from fedfm.models.influence import reads_padding
from fedfm.models.language import chat_templates, generation, truncation
from fedfm.models.language.chat_form import ASSISTANT
from fedfm.models.language.encoding import prompts
from fedfm.models.language.next_token import logits_and_targets, rows_at_once
from fedfm.models.language.tool_calls import one_call
from fedfm.models.memory_budget import TOKENS, in_halves, warn
from fedfm.models.metrics import Scores, finite, nothing
from fedfm.models.precision import reduced_precision
from fedfm.models.preprocessing import IGNORE, LOCAL_SHARE

if TYPE_CHECKING:
    from fedfm.models.model_task import ModelTask
    from fedfm.models.network import Network


def likelihood(model: Network, rows: Rows) -> Scores:
    """A language model's loss per predicted token, perplexity and accuracy.

    For instructions, only the tokens of the answers count.
    """
    found = of_tokens(count_tokens(model, rows))
    return nothing(len(rows)) | {key: None if value is None else finite(value) for key, value in found.items()}


def count_tokens(model: Network, rows: Rows, batch_size: int = 64) -> dict[str, float]:
    """Numbers of predicted tokens and of right predictions, and the sum of the tokens' losses in float64.

    The memory for the logits limits the number of rows in a batch. A model that several processes compute counts them
    itself.
    """
    of_group: Callable[[Rows], dict[str, float]] | None = getattr(model, "count_tokens", None)
    if of_group is not None:
        return of_group(rows)
    size = rows_at_once(model, rows, batch_size)
    return sum_tokens(model, rows, size, lambda batch: logits_and_targets(model, batch))


def sum_tokens(
    model: Network, rows: Rows, batch_size: int, predict: Callable[[Batch], tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """The sums of :func:`count_tokens`.

    Args:
        predict: the logits (n, V) and targets (n,) of a batch; targets :data:`IGNORE` do not count.
    """

    def sums(size: int) -> tuple[float, int, int]:
        total, hits, tokens = 0.0, 0, 0
        with torch.no_grad(), model.evaluating():
            for batch in rows.batches(size):
                logits, targets = predict(batch)
                counts = targets != IGNORE
                total += float(F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none").double().sum())
                hits += int((logits.argmax(-1) == targets)[counts].sum())
                tokens += int(counts.sum())
        return total, hits, tokens

    (total, hits, tokens), _ = in_halves(batch_size, sums, warn)
    return {"tokens": tokens, "right_tokens": hits, "loss_of_tokens": total}


def of_tokens(sums: Mapping[str, float]) -> Scores:
    """``accuracy``, ``loss`` and ``perplexity`` from the sums of :func:`count_tokens`; None if there are no tokens."""
    if not (tokens := sums["tokens"]):
        return dict.fromkeys(("accuracy", "loss", "perplexity"))
    loss = sums["loss_of_tokens"] / tokens
    perplexity = math.exp(min(loss, 709.0)) if math.isfinite(loss) else math.nan
    return {"accuracy": sums["right_tokens"] / tokens, "loss": loss, "perplexity": perplexity}


def compare_texts(said: Sequence[Answer], right: Sequence[str]) -> dict[str, float]:
    """Numbers of answers, of exact matches with the reference and of cut answers, and the sum of the answers' ROUGE-1.

    A cut answer ends at the limit of tokens.
    """
    pairs = list(zip((a.text for a in said), right, strict=True)) if said else []
    return {
        "answers": len(pairs),
        "exact_answers": sum(a.strip() == b.strip() for a, b in pairs),
        "rouge_of_answers": sum(rouge_1(a, b) for a, b in pairs),
        "cut_answers": sum(a.cut for a in said),
    }


def of_answers(sums: Mapping[str, float]) -> Scores:
    """``exact_match``, ``rouge_1`` and ``answers_cut`` from the sums of :func:`compare_texts`; None without answers.

    ``answers_cut`` is the share of answers that end at the limit of tokens: a longer answer might match.
    """
    names = {"exact_match": "exact_answers", "rouge_1": "rouge_of_answers", "answers_cut": "cut_answers"}
    return {figure: sums[name] / sums["answers"] if sums["answers"] else None for figure, name in names.items()}


@dataclass(frozen=True)
class Answer:
    """A model's answer to one instruction.

    Attributes:
        tokens: the answer's tokens, with the end token.
        text: the answer's text, without special tokens.
        cut: whether the answer ends at the limit of tokens, without an end token.
    """

    tokens: tuple[int, ...]
    text: str
    cut: bool


def answer_limit(model: Network) -> int:
    """The largest number of tokens of an answer, which the task defines."""
    return cast("ModelTask", model.task).answer_limit(model.tools)


def answers(
    model: Network,
    rows: Rows,
    batch_size: int = 64,
    asked: Sequence[Tensor] | None = None,
    more: Callable[[list[int], int], Mapping[str, Tensor]] = lambda some, length: {},
) -> list[Answer]:
    """The model's greedy answers to instruction rows; they do not depend on the rows' reference answers.

    A batch has prompts of similar length with masked padding on the left. Its limits are ``batch_size`` rows and
    :data:`~fedfm.models.memory_budget.TOKENS` tokens. A model that reads padding, such as RWKV, answers one prompt at a
    time; in a batch, transformers (5.24) would also mix the rows' states. A row gets the same answer alone and in
    a batch, unless two tokens have equal logits up to rounding.

    Args:
        asked: tokens of each prompt; if None, the model's template writes the prompts.
        more: (indexes of rows, length of their padded prompts) -> further arguments of the model for these rows.
    """
    limit, window, places = answer_limit(model), model.tools.max_length, model.tools.positions
    room = min(window, places - limit) if places else window
    if asked is None:
        asked = prompts(rows.pairs or (), model.tools.tokenizer, room, model.tools.template)
    share = rows.tensors.get(LOCAL_SHARE)
    order = sorted(range(len(asked)), key=lambda i: len(asked[i]))
    out = [Answer((), "", False)] * len(asked)
    generate: Any = getattr(model.module, "generate")  # noqa: B009  (a method that only causal models have)
    called = [has_tools(said) for said, *_ in rows.pairs or ()]
    ends = end_tokens(model, any(called))
    alike = generation.reads_padding(getattr(model.module, "generation_config", None))

    def answer(some: list[int], size: int) -> None:
        if len(some) > size:
            answer(some[:size], size)
            return answer(some[size:], size)
        longest = len(asked[some[-1]])
        batch = torch.full((len(some), longest), rows.pad)  # (b, L)
        mask = torch.zeros_like(batch)  # (b, L)
        for row, i in enumerate(some):
            batch[row, longest - len(asked[i]) :], mask[row, longest - len(asked[i]) :] = asked[i], 1
        model.share = None if share is None else share[some]
        said = generate(
            input_ids=batch.to(model.device),
            attention_mask=mask.to(model.device),
            **more(some, longest),
            max_new_tokens=limit,
            **generation.GREEDY,
            use_cache=True,
            eos_token_id=sorted(ends) or None,
            pad_token_id=rows.pad,
        )
        for i, ids in zip(some, said[:, longest:].tolist(), strict=True):
            tokens = _until(ids, ends)
            text = _text(tokens, called[i], ends, model)
            out[i] = Answer(tuple(tokens), text, cut=ends.isdisjoint(tokens))

    with torch.no_grad(), model.evaluating(), reduced_precision(model.spec.dtype, model.device):
        at, most, lengths = 0, batch_size, [len(ids) + limit for ids in asked]
        if len(order) > 1 and model.answers_alone is None:
            of_last = None if share is None else share[order[-1:]]
            model.answers_alone = reads_padding(model, asked[order[-1]], rows.pad, of_last)
        most = 1 if model.answers_alone else most
        while at < len(order):
            some = _first(order[at:], lengths, most, alike=alike)
            _, fit = in_halves(len(some), partial(answer, some), warn)
            at, most = at + len(some), fit if fit < len(some) else most
    return out


def _first(order: list[int], lengths: list[int], most: int, *, alike: bool) -> list[int]:
    """The first rows of this order (by length) that fit into one batch; if ``alike``, only rows of one length."""
    size = 1
    while size < min(most, len(order)) and (size + 1) * lengths[order[size]] <= TOKENS:
        if alike and lengths[order[size]] != lengths[order[0]]:
            break
        size += 1
    return order[:size]


def _text(tokens: Sequence[int], called: bool, ends: set[int], model: Network) -> str:
    """A generated answer as text without special tokens; if it may call a tool, only the end token is removed."""
    kept = [token for token in tokens if token not in ends] if called else tokens
    text = model.tools.tokenizer.decode(kept, skip_special_tokens=not called)
    return chat_templates.answer_of(text, model.tools.template, model.tools.tokenizer, special=called)


def end_tokens(model: Network, called: bool) -> set[int]:
    """The end tokens of the model and of the tokenizer, and the tokens that end answers in training.

    Args:
        called: whether an answer may be a call of a tool.
    """
    module: Any = model.module
    found = module.generation_config.eos_token_id
    own = {found} if isinstance(found, int) else set(found or ())
    tokenizer, template = model.tools.tokenizer, model.tools.template
    taught = {tokenizer.eos_token_id, truncation.end_token(template, tokenizer)}
    if called:
        with suppress(InputError):  # a template may accept tools and still refuse this call
            taught.add(truncation.end_token(template, tokenizer, (one_call(ASSISTANT, "f", {"a": "b"}),)))
    return own | (taught - {None})


def _until(ids: list[int], ends: set[int]) -> list[int]:
    """The tokens up to and including the first end token; padding follows them."""
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: stop + 1]


def references(model: Network, rows: Rows) -> list[str]:
    """The uncut reference answers of instruction rows; tool calls are in the form that the model writes."""
    pairs = [(said, output) for said, output, *_ in rows.pairs or ()]
    called = any(not isinstance(output, str) for _, output in pairs)
    ends: set[int] = end_tokens(model, True) if called else set()

    def text(said: Asked, output: Output) -> str:
        if isinstance(output, str):
            return output
        row = chat_templates.encode_row(said, output, model.tools.template, model.tools.tokenizer)
        return _text(_until(row.ids[row.start :], ends), has_tools(said), ends, model)

    return [text(said, output) for said, output in pairs]


def rouge_1(answer: str, reference: str) -> float:
    """F1 of the common words of answer and reference, in lower case (Lin 2004)."""
    a, b = Counter(answer.lower().split()), Counter(reference.lower().split())
    common = sum((a & b).values())
    return 2 * common / (sum(a.values()) + sum(b.values())) if common else float(a == b)
