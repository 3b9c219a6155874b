"""What a text model can read: how many tokens of a row it has positions for, and which tokens its embedding knows.

Both are read from the loaded module, not from names of families: a position embedding with a padding index begins
behind it (RoBERTa, MPNet, Longformer), and an embedding may have fewer rows than the tokenizer has tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedfm.errors import InputError
from fedfm.models.preprocessors import Tools

if TYPE_CHECKING:
    from fedfm.core.tokens import Tokens
    from fedfm.models.spec import ModelSpec


RESIZE = (
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
        f"embedding of model.name {limit} rows ({RESIZE})"
    )


def exceeds(tools: Tools) -> bool:
    """Whether the tokenizer has tokens that the embedding lacks, so that only the rows tell whether it matters."""
    return tools.tokenizer is not None and tools.vocabulary is not None and len(tools.tokenizer) > tools.vocabulary
