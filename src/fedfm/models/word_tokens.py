"""Tokenises sentences that are lists of words, and finds the words among the tokens."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from fedfm.core.tokens import Tokens
from fedfm.errors import InputError
from fedfm.models import preprocessing
from fedfm.models.preprocessors import Tools
from fedfm.models.quiet import quiet


@dataclass(frozen=True)
class WordTokens:
    """n tokenised sentences.

    Attributes:
        tokens: for each sentence its token ids.
        token_arguments: the tokenizer's other values for each token; the keys are names of the model's arguments.
        places: for each sentence the position of each word's first token, by the word's index; words without a token
            are missing.
    """

    tokens: Tokens
    token_arguments: dict[str, Tokens]
    places: list[dict[int, int]]


def of(sentences: Sequence[Sequence[str]], tools: Tools) -> WordTokens:
    """The sentences in at most ``max_length`` tokens each.

    The words are joined by spaces, so that a model reads running text in training, as it does in a pipeline.

    Raises:
        InputError: the tokenizer does not report the characters of a token.
    """
    tokenizer = tools.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"model.name: the tokenizer, a {type(tokenizer).__name__}, does not say to which word a token belongs: "
            "use a model with a fast tokenizer"
        )
    names = preprocessing.token_argument_names(tokenizer)
    ids: list[list[int]] = []
    token_arguments: dict[str, list[list[int]]] = {name: [] for name in names}
    places: list[dict[int, int]] = []
    for start in range(0, len(sentences), preprocessing.CHUNK):
        some = sentences[start : start + preprocessing.CHUNK]
        with quiet():
            written = tokenizer(
                [" ".join(words) for words in some],
                truncation=True,
                max_length=tools.max_length,
                return_offsets_mapping=True,
            )
        ids += [row or [tokenizer.pad_token_id or 0] for row in written["input_ids"]]  # no model accepts length 0
        for name in names:
            token_arguments[name] += [row or [0] for row in written[name]]
        for i, words in enumerate(some):
            places.append(_first_tokens(words, written["offset_mapping"][i], written.sequence_ids(i)))
    return WordTokens(Tokens.of(ids), {name: Tokens.of(rows) for name, rows in token_arguments.items()}, places)


def _first_tokens(
    words: Sequence[str], offsets: Sequence[tuple[int, int]], sentence: Sequence[int | None]
) -> dict[int, int]:
    """The position of each word's first token, by the word's index, for words joined by spaces.

    Args:
        offsets: for each token its characters [start, end).
        sentence: for each token its sentence; None for a token that the tokenizer adds.
    """
    text, starts = " ".join(words), list(accumulate((len(word) + 1 for word in words[:-1]), initial=0))
    found: dict[int, int] = {}
    for at, ((start, end), inside) in enumerate(zip(offsets, sentence, strict=True)):
        first = next((i for i in range(start, end) if not text[i].isspace()), None)
        if inside is not None and first is not None:
            found.setdefault(bisect.bisect_right(starts, first) - 1, at)
    return found
