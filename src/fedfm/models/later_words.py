"""Whether a model that is trained to predict the next word sees it: then its loss is low and it has learnt nothing.

Some classes of transformers have a head for words and attend in both directions, and no setting tells them all. So the
model is asked: where only the last word of a text differs, the logits before it must not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.errors import InputError
from fedfm.models import influence
from fedfm.models.families import unwrap

if TYPE_CHECKING:
    from fedfm.models.model import Model

_LONGEST = 32  # tokens that are read: enough to see, and cheap


def refuse(model: Model, rows: Rows) -> None:
    """Refuse a language model whose logits for a place depend on the words behind it.

    Args:
        rows: a few training rows; of them the longest is read, at most its first 32 tokens.

    Raises:
        InputError: they do.
    """
    if rows.tokens is None or rows.longest < 2:
        return
    ids = max(rows.tokens, key=len)[:_LONGEST]
    with model.evaluating():
        one, other = (_logits(model, text)[:-1] for text in (ids, _ends_otherwise(ids)))
    if torch.equal(one.nan_to_num(), other.nan_to_num()) or not _depend(model, ids):
        return
    config = getattr(unwrap(model.module), "config", None)
    setting = ""
    if getattr(config, "causal", None) is False:
        setting = ', or "causal": true in its config.json if it was trained so'
    kind = getattr(config, "model_type", type(unwrap(model.module)).__name__)
    raise InputError(
        f"model.name: {model.spec.name!r} is of type {kind!r}, which sees the words that it predicts: its logits for "
        f'a word change with a later one; model.task = "{model.task}" needs a causal model, such as a llama or a '
        f"gpt2{setting}"
    )


def _logits(model: Model, ids: Tensor) -> Tensor:
    """(L, V) of one text."""
    return model.logits(Rows(tokens=Tokens.of([ids])).batch([0]))[0].float()


def _ends_otherwise(ids: Tensor) -> Tensor:
    """The same tokens with another one at the end, which the model knows: of the row itself, else a neighbour."""
    others = ids[ids != ids[-1]]
    end = others[0] if len(others) else (ids[-1] - 1).abs()
    return torch.cat([ids[:-1], end[None]])


def _depend(model: Model, ids: Tensor) -> bool:
    """Whether the logits before the last token have a gradient in its embedding: experts that take other tokens
    together round the earlier ones otherwise, so that numbers alone do not tell.
    """
    with model.evaluating():
        found = influence.of_places(model.module, lambda: _logits(model, ids)[:-1])
    return found is None or any(bool(depends[..., -1].any()) for depends in found)
