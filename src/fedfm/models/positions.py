"""Reads two limits from the module of a text model: its number of positions and its number of token embeddings."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from fedfm.errors import InputError
from fedfm.models.preprocessors import Tools

if TYPE_CHECKING:
    from fedfm.models.spec import ModelSpec
from fedfm.models.lengths import RESIZE


def fit(tools: Tools, spec: ModelSpec, module: nn.Module, config: Any) -> Tools:
    """The tools with this module's limits of lengths and tokens.

    Args:
        config: the text encoder's configuration.

    Raises:
        InputError: the padding token has no row in the embedding.
    """
    words = embedding(module)
    rows = None if words is None else int(words.weight.shape[0])
    pad = tools.tokenizer.pad_token_id
    if rows is not None and pad is not None and pad >= rows:
        raise InputError(
            f"model.name: the padding token {tools.tokenizer.pad_token!r} of {spec.name!r} has the id {pad}, and "
            f"the model's embedding has only {rows} rows ({RESIZE})"
        )
    notices = tools.notices
    if rows is not None and spec.weights == "pretrained":
        from fedfm.models import tokenizer_files

        notices += tokenizer_files.of_another_model(tools.tokenizer, rows, spec.name)
    positions = _positions(module, words, config)
    length = min(spec.max_length, positions) if positions else spec.max_length
    return dataclasses.replace(tools, max_length=length, positions=positions, vocabulary=rows, notices=notices)


def embedding(module: nn.Module) -> Any:
    """The token embedding; None if the model has no table for it (CANINE hashes characters)."""
    try:
        found = module.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, KeyError):
        return None
    weight = getattr(found, "weight", None)
    return found if weight is not None and weight.dim() == 2 and hasattr(found, "padding_idx") else None


def train_every_word(module: nn.Module) -> None:
    """Give each row of the token embedding a gradient, also the padding token's.

    torch withholds it from the token of which a configuration says that it pads. Where fedfm chose the end token or the
    unknown token for padding, texts have this token, too. Padding itself gets no gradient, since it is masked.
    """
    words = embedding(module)
    if words is not None:
        words.padding_idx = None


def _positions(module: nn.Module, words: Any, config: Any) -> int | None:
    """The number of positions of the model; None if there is no limit."""
    keys = ("max_position_embeddings", "n_positions", "max_target_positions")
    stated = next((n for key in keys if isinstance(n := getattr(config, key, None), int) and n > 0), None)
    if stated is None:  # XLNet states -1, because its positions are relative
        return None
    tables = [m for m in module.modules() if m is not words and _rows(m) == stated]
    behind = [m.padding_idx + 1 for m in tables if isinstance(m.padding_idx, int)]
    return max(stated - max(behind, default=0), 1)


def _rows(module: Any) -> int | None:
    """The number of rows of a table of vectors; None for other modules."""
    weight = getattr(module, "weight", None) if hasattr(module, "padding_idx") else None
    return None if weight is None else int(weight.shape[0])
