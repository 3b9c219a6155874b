"""The rule that cuts a row of a prompt and its answer to ``max_length`` tokens.

An answer may use the tokens that the prompt leaves free, but at least half of ``max_length``. The prompt uses the rest.
So a row that is too long gets ``max_length`` tokens and always keeps some of its answer. The prompt loses tokens at its
beginning, after the token that begins every text (BOS). The answer loses its end, with the token that ends it (EOS): a
model that learned EOS after a cut would learn to stop within a sentence.
"""

from __future__ import annotations

from typing import Any

from fedfm.core.rows import Output
from fedfm.models.language.chat_form import special_ids
from fedfm.models.language.chat_templates import Written, encode_row

_END = 4  # largest number of tokens of an answer's end: the end token and, for example, a line break


def cut(row: Written, most: int, tokenizer: Any, longest: int | None = None) -> Written:
    """The row, cut to at most ``most`` tokens; ``most`` is at least 2.

    Args:
        longest: number of tokens of the longest answer to this prompt, so that all rows with the prompt keep the same
            part of the prompt; None means the number of tokens of this row's answer.

    Example:
        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(bos_token_id=1, all_special_ids=[1, 2])
        >>> row = Written([1, 5, 6, 7, 8, 9, 2], [False] * 3 + [True] * 4, 3)
        >>> cut(row, 5, tokenizer).ids
        [1, 6, 7, 8, 9]
    """
    answer = len(row.ids) - row.start
    reserved = min(longest or answer, max(most - most // 2, most - row.start))
    head = keep_end(row.ids[: row.start], min(row.start, most - reserved), tokenizer)
    end = row.start + min(answer, most - len(head))
    index = [*head, *range(row.start, end)]
    return Written([row.ids[i] for i in index], [row.counts[i] for i in index], len(head))


def keep_end(prompt: list[int], room: int, tokenizer: Any) -> list[int]:
    """Indexes of the tokens of a prompt that are kept: BOS and the last tokens."""
    n = len(prompt)
    if n <= room:
        return list(range(n))
    first = [0] if room > 1 and prompt[0] == tokenizer.bos_token_id else []
    return first + list(range(n - room + len(first), n))


def _end(answer: list[int], tokenizer: Any) -> int:
    """Index of the special token that ends the answer; the answer's length if there is none."""
    n, special = len(answer), special_ids(tokenizer)
    return next((i for i in range(n - 1, max(n - 1 - _END, -1), -1) if answer[i] in special), n)


def end_token(template: str | None, tokenizer: Any, output: Output = "b") -> int | None:
    """The token with which the template ends an answer; None if the template writes no such token."""
    row = encode_row("a", output, template, tokenizer)
    answer = row.ids[row.start :]
    end = _end(answer, tokenizer)
    return answer[end] if end < len(answer) else None
