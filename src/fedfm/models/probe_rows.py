"""Two invented texts for checks of a model. All clients check the same texts, whatever their rows."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.models import preprocessing
from fedfm.models.families import unwrap

if TYPE_CHECKING:
    from fedfm.models.network import Network

_WORDS = (3, 7)  # number of words of the two texts


def probe_rows(model: Network, rows: Rows) -> Rows:
    """Two invented texts from :func:`made_texts`; if the rows are not texts, the first and the last row instead."""
    if model.tools.tokenizer is None or rows.tokens is None:
        return rows.take([0, len(rows) - 1])
    return made_texts(model)


def made_texts(model: Network) -> Rows:
    """Two texts that differ in length and tokens, with the tokenizer's special tokens."""
    tokenizer = model.tools.tokenizer
    special = {i for i in tokenizer.all_special_ids if i != tokenizer.unk_token_id}
    words = itertools.cycle([i for i in range(_vocabulary(model)) if i not in special])
    found, kinds = [], list[dict[str, Tokens]]()
    for n in _WORDS:
        framed, of = preprocessing.encode([" ".join(["a"] * n)], tokenizer, model.tools.max_length)
        kinds.append(of)
        found.append([i if i in special else next(words) for i in map(int, framed[0])])
    more = {name: Tokens.joining([of[name] for of in kinds]) for name in kinds[0]}
    return Rows(tokens=Tokens.of(found), pad=tokenizer.pad_token_id or 0, token_arguments=more)


def _vocabulary(model: Network) -> int:
    """The number of tokens that both the tokenizer and the model know."""
    config: Any = getattr(unwrap(model.module), "config", None)
    known = getattr(config.get_text_config(), "vocab_size", None) if hasattr(config, "get_text_config") else None
    count = len(model.tools.tokenizer)
    return min(count, known) if isinstance(known, int) else count
