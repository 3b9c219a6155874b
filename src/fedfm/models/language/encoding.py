"""Prepares a language model's rows: cuts passages into blocks, and joins prompts with their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedfm.core.rows import Asked, Batch, Output
from fedfm.core.tokens import Tokens
from fedfm.models import left_out
from fedfm.models.language import chat_templates, truncation
from fedfm.models.preprocessing import IGNORE
from fedfm.models.quiet import quiet

if TYPE_CHECKING:
    from fedfm.data.table import Table


def passages(pieces: list[str], tokenizer: Any, max_length: int) -> Tokens:
    """The joined pieces as blocks of ``max_length`` tokens.

    Each block starts with the BOS token if the tokenizer adds one by itself. The last block may be shorter; it is
    dropped if it has fewer than 2 tokens, since it would predict nothing.
    """
    if not pieces:
        return Tokens.of([])
    with quiet():
        text = "".join(p if p[-1:].isspace() else p + "\n" for p in pieces)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        empty = tokenizer("")["input_ids"]
    first = empty[:1] if empty and tokenizer.bos_token_id is not None and empty[0] == tokenizer.bos_token_id else []
    step = max_length - len(first)
    blocks = [first + ids[i : i + step] for i in range(0, len(ids), step)]
    return Tokens.of([b for b in blocks if len(b) > 1])


def instructions(
    pairs: Sequence[tuple[Asked, Output]], tokenizer: Any, max_length: int, template: str | None
) -> tuple[Tokens, dict[str, Tensor]]:
    """Training rows, cut by :mod:`fedfm.models.language.truncation`: token vectors of prompt and answer.

    Returns:
        the rows, and ``answer_start`` (n,), where the last answer begins. If the loss does not count exactly the tokens
        from there on, also ``answer_spans`` (n, k, 2), where each answer begins and ends. A row with fewer than k
        answers has zeros in place of the missing ones.
    """
    with quiet():
        whole = (chat_templates.encode_row(said, output, template, tokenizer) for said, output in pairs)
        rows = [truncation.cut(row, max_length, tokenizer) for row in whole]
    return Tokens.of([row.ids for row in rows]), answer_places(rows)


class TokenRow(Protocol):
    """A row: its tokens, whether the loss counts each token, and the index where the last answer begins."""

    @property
    def ids(self) -> list[int]: ...
    @property
    def counts(self) -> list[bool]: ...
    @property
    def start(self) -> int: ...


def answer_places(rows: Sequence[TokenRow]) -> dict[str, Tensor]:
    """The tensors ``answer_start`` and, if needed, ``answer_spans`` of the rows; :func:`instructions` explains them."""
    where = {"answer_start": torch.tensor([row.start for row in rows], dtype=torch.int64)}
    spans = [_spans(row.counts) for row in rows]
    if any(of != [(row.start, len(row.ids))] for of, row in zip(spans, rows, strict=True)):
        most = max(map(len, spans))
        padded = [[*of, *[(0, 0)] * (most - len(of))] for of in spans]
        where["answer_spans"] = torch.tensor(padded, dtype=torch.int64).reshape(len(rows), most, 2)
    return where


def _spans(counts: Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of each maximal run of tokens that count."""
    edges = np.flatnonzero(np.diff([False, *counts, False])).reshape(-1, 2)
    return [(int(a), int(b)) for a, b in edges]


def preferences(
    triples: Sequence[tuple[Asked, Output, Output]], tokenizer: Any, max_length: int, template: str | None
) -> tuple[Tokens, dict[str, Tensor]]:
    """Rows of two texts, one after the other: the prompt with the better answer, and the prompt with the worse one.

    Each text is cut to ``max_length`` as in :func:`instructions`, and both keep the same part of the prompt.

    Returns:
        the rows; ``second`` (n,), where the second text begins; ``answer_start`` (n, 2), where the answers begin in
        their texts.
    """
    tokens, second, starts = [], [], []
    with quiet():
        for said, *answers in triples:
            both = _same_length(
                [chat_templates.encode_row(said, a, template, tokenizer) for a in answers], max_length, tokenizer
            )
            tokens.append([i for row in both for i in row.ids])
            second.append(len(both[0].ids))
            starts.append([row.start for row in both])
    where = {"second": torch.tensor(second, dtype=torch.int64)}
    return Tokens.of(tokens), where | {"answer_start": torch.tensor(starts, dtype=torch.int64).reshape(-1, 2)}


def _same_length(rows: list[chat_templates.Written], max_length: int, tokenizer: Any) -> list[chat_templates.Written]:
    longest = max(len(row.ids) - row.start for row in rows)

    return [truncation.cut(row, max_length, tokenizer, longest) for row in rows]


def cut_rows(
    table: Table, index: Sequence[int] | np.ndarray, tokenizer: Any, max_length: int, template: str | None
) -> int:
    """The number of rows in which the prompt and an answer together have more than ``max_length`` tokens."""
    count = 0
    with quiet():
        for said, *answers in table.take(np.asarray(index, dtype=np.int64)).inputs:
            whole = (chat_templates.encode_row(said, answer, template, tokenizer).ids for answer in answers)
            count += any(len(ids) > max_length for ids in whole)
    return count


def template_losses(
    table: Table, index: Sequence[int] | np.ndarray, tokenizer: Any, template: str | None
) -> Counter[str]:
    """Counts of the words in these rows that the template leaves out, from :func:`fedfm.models.left_out.count`."""
    with quiet():
        return left_out.count(table.take(np.asarray(index, dtype=np.int64)).inputs, template, tokenizer)


def prompts(pairs: Sequence[tuple[Asked, Output]], tokenizer: Any, length: int, template: str | None) -> list[Tensor]:
    """Each prompt in at most ``length`` tokens. A longer prompt keeps BOS and its last tokens."""
    with quiet():
        asked = [chat_templates.prompt_tokens(said, template, tokenizer) for said, _ in pairs]
    kept = (([ids[i] for i in truncation.keep_end(ids, length, tokenizer)]) for ids in asked)
    return [torch.tensor(ids, dtype=torch.int64) for ids in kept]


def next_tokens(batch: Batch) -> Tensor:
    """The targets (b, L - 1) at each position but the last; ``IGNORE`` where the loss does not count the token."""
    targets = batch["input_ids"]
    if "attention_mask" in batch:
        targets = targets.masked_fill(batch["attention_mask"].to(targets.device) == 0, IGNORE)
    place = torch.arange(targets.shape[1], device=targets.device)
    if "answer_spans" in batch:
        starts, ends = batch["answer_spans"].to(targets.device).unbind(-1)  # (b, k)
        within = (place >= starts[..., None]) & (place < ends[..., None])  # (b, k, L)
        targets = targets.masked_fill(~within.any(1), IGNORE)
    elif "answer_start" in batch:
        targets = targets.masked_fill(place < batch["answer_start"].to(targets.device)[:, None], IGNORE)
    return targets[:, 1:]
