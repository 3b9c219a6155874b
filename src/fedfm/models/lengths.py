"""What a text model can read: how many tokens of a row it has positions for, and which tokens its embedding knows.

Both are read from the loaded module, not from names of families: a position embedding with a padding index begins
behind it (RoBERTa, MPNet, Longformer), and an embedding may have fewer rows than the tokenizer has tokens.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fedfm.errors import InputError
from fedfm.models.preprocessors import Tools

if TYPE_CHECKING:
    from fedfm.core.tokens import Tokens
    from fedfm.models.spec import ModelSpec


def fit(tools: Tools, spec: ModelSpec, module: nn.Module, config: Any) -> Tools:
    """The tools with the lengths and tokens that this module takes.

    Args:
        config: of the text encoder.

    Raises:
        InputError: the padding token has no row in the embedding, or no room is left for a prompt.
    """
    words = embedding(module)
    rows = None if words is None else int(words.weight.shape[0])
    pad = tools.tokenizer.pad_token_id
    if rows is not None and pad is not None and pad >= rows:
        raise InputError(
            f"model.name: the padding token {tools.tokenizer.pad_token!r} of {spec.name!r} has the number {pad}, and "
            f"the model's embedding {rows} rows ({_RESIZE})"
        )
    positions = _positions(module, words, config)
    length = min(spec.max_length, positions) if positions else spec.max_length
    if positions and spec.answer_tokens is not None and spec.answer_tokens >= positions:
        raise InputError(
            f"model.answer_tokens = {spec.answer_tokens}: {spec.name!r} has {positions} positions for a prompt and its "
            f"answer; expected at most {positions - 1}"
        )
    return dataclasses.replace(tools, max_length=length, positions=positions, vocabulary=rows)


_RESIZE = (
    "tokens were added to the tokenizer alone: give the model rows for them by "
    "model.resize_token_embeddings(len(tokenizer)), and save both"
)


def notice(spec: ModelSpec, tools: Tools) -> tuple[str, ...]:
    """A line if a ``model.max_length`` that was asked for is more than the model has positions for."""
    asked = spec.max_length != type(spec).max_length  # the default is for all models, such as CLIP of 77 positions
    if tools.tokenizer is None or not tools.positions or spec.max_length <= tools.positions or not asked:
        return ()
    return (
        f"model.max_length = {spec.max_length}: {spec.name} has positions for {tools.positions} tokens, so longer rows "
        f"are cut to {tools.positions}",
    )


def check(tools: Tools, tokens: Tokens, where: str, rows: np.ndarray | None = None) -> None:
    """Refuse rows with a token that the embedding lacks.

    Args:
        where: the file.
        rows: (n,) the numbers of these rows in the file, from 0; None: unknown.

    Raises:
        InputError: with the first row, its token, and both sizes.
    """
    limit = tools.vocabulary
    if limit is None or not len(tokens):
        return
    found = tokens.concatenate().numpy()
    beyond = np.flatnonzero(found >= limit)
    if not len(beyond):
        return
    row = int(np.searchsorted(np.cumsum(tokens.length), beyond[0], side="right"))
    token = int(found[beyond[0]])
    name = tools.tokenizer.convert_ids_to_tokens(token)
    place = where if rows is None else f"{where}, row {int(rows[row]) + 1}"
    raise InputError(
        f"{place}: the token {name!r} has the number {token}; the tokenizer has {len(tools.tokenizer)} tokens, and the "
        f"embedding of model.name {limit} rows ({_RESIZE})"
    )


def exceeds(tools: Tools) -> bool:
    """Whether the tokenizer has tokens that the embedding lacks, so that only the rows tell whether it matters."""
    return tools.tokenizer is not None and tools.vocabulary is not None and len(tools.tokenizer) > tools.vocabulary


def embedding(module: nn.Module) -> Any:
    """The embedding of the tokens; None where the model has none that is a table (CANINE hashes characters)."""
    try:
        found = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, KeyError):
        return None
    weight = getattr(found, "weight", None)
    return found if weight is not None and weight.dim() == 2 and hasattr(found, "padding_idx") else None


def _positions(module: nn.Module, words: Any, config: Any) -> int | None:
    """How many tokens the model has positions for; None without a limit."""
    keys = ("max_position_embeddings", "n_positions")
    stated = next((n for key in keys if isinstance(n := getattr(config, key, None), int) and n > 0), None)
    if stated is None:  # XLNet says -1: its positions are relative
        return None
    tables = [m for m in module.modules() if m is not words and _rows(m) == stated]
    behind = [m.padding_idx + 1 for m in tables if isinstance(m.padding_idx, int)]
    return max(stated - max(behind, default=0), 1)


def _rows(module: Any) -> int | None:
    """Rows of a table of vectors; None of other modules."""
    weight = getattr(module, "weight", None) if hasattr(module, "padding_idx") else None
    return None if weight is None else int(weight.shape[0])
