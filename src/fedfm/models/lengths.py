"""The limits of a text model: its number of positions, and the tokens that its embedding has.

Both are read from the loaded module, not from a family's name: a position embedding with a padding index begins after
that index (RoBERTa, MPNet, Longformer), and an embedding may have fewer rows than the tokenizer has tokens.
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
    "tokens were added only to the tokenizer: give the model rows for them by "
    "model.resize_token_embeddings(len(tokenizer)), and save both"
)


def notice(spec: ModelSpec, tools: Tools) -> tuple[str, ...]:
    """Notices if ``model.max_length`` exceeds the model's number of positions, or the limit that its tokenizer states.

    Rows are cut to the positions, since the model has no others. They are not cut to the tokenizer's limit: it only
    says for how many tokens the model was made.
    """
    found, stated = [], tools.tokenizer.model_max_length  # transformers' default is larger than any model's length
    # The default is the same for all models, also for CLIP, which has 77 positions.
    if tools.positions and spec.max_length > tools.positions and spec.max_length != type(spec).max_length:
        found.append(
            f"model.max_length = {spec.max_length}: {spec.name} has positions for {tools.positions} tokens, so longer "
            f"rows are cut to {tools.positions}"
        )
    if tools.max_length > stated:
        found.append(
            f"model.max_length = {spec.max_length}: the tokenizer of {spec.name} states {stated} tokens "
            f"(model_max_length); rows keep {tools.max_length}, more than the model may have learned"
        )
    return tuple(found)


def check(tools: Tools, tokens: Tokens, where: str, rows: np.ndarray | None = None) -> None:
    """Refuse rows with a token that the embedding lacks.

    Args:
        where: the file, for the message.
        rows: (n,) indexes of these rows in the file, from 0; None if they are unknown.

    Raises:
        InputError: there is such a row; the error names the first one, its token, and both sizes.
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
        f"{place}: the token {name!r} has the id {token}; the tokenizer has {len(tools.tokenizer)} tokens, and the "
        f"embedding of model.name has {limit} rows ({RESIZE})"
    )


def exceeds(tools: Tools) -> bool:
    """Whether the tokenizer has tokens that the embedding lacks; such tokens need not occur in the rows."""
    return tools.tokenizer is not None and tools.vocabulary is not None and len(tools.tokenizer) > tools.vocabulary
