"""Checks whether a user's module sees the words that it is trained to predict. Such a module learns nothing.

The check is for rows whose targets are the row's own words. A target is at its word's position, as in Hugging Face's
models, or one position earlier. The loss of the last target must not change with the last word. The check skips modules
that fill in masked words, and encoder-decoders, because their targets are other words than their inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedfm.core.rows import Batch
from fedfm.errors import InputError
from fedfm.models import influence
from fedfm.models.families import unwrap
from fedfm.models.model import Model
from fedfm.models.preprocessing import IGNORE

_LEAST = 3  # smallest number of targets and of different words in a row that is checked
_ROUNDED = 1e-3  # relative difference of two losses that may be rounding: experts may group the words differently


def refuse(model: Model, batch: Batch, alias: str) -> tuple[str, ...]:
    """A notice if the module's loss for a word depends on that word.

    Args:
        batch: a few rows; the first is read.
        alias: the other name of the target in a batch; "" if it has none.

    Raises:
        InputError: the loss depends on the word, and the module is a language model of transformers, which should
            predict the next word.
    """
    module = unwrap(model.module)
    pair = getattr(getattr(module, "config", None), "is_encoder_decoder", False)
    found = None if pair else _last_target(batch, alias)
    if found is None:
        return ()
    name, ids, one = found
    one |= {alias: one["labels"]} if alias else {}
    try:
        with model.evaluating(), torch.random.fork_rng(devices=[]):
            if not _sees_last(model, name, ids, one):
                return ()
    except Exception:  # the user's own loss may need more than one target
        return ()
    kind = type(module).__name__
    line = f"a {kind} sees the words that it predicts: its loss for a word changes with that word"
    if type(module).__module__.startswith("transformers."):
        raise InputError(
            f"model: {line}; expected a causal model, such as a gpt2, or one with is_decoder=True, or masked words"
        )
    return (f"{line}; a model that is to predict the next word must not see it",)


def _sees_last(model: Model, name: str, ids: Tensor, batch: Batch) -> bool:
    """Whether the loss of this batch depends on the last word of ``ids`` (1, L), which the batch has under ``name``."""
    other = ids.clone()
    other[0, -1] = next(iter(ids[0][ids[0] != ids[0, -1]].tolist()))
    losses = [float(model.loss(batch | {name: words})) for words in (ids, other)]
    if not abs(losses[0] - losses[1]) > 0:  # also if both are NaN, because the loss of one target is undefined
        return False
    depends = influence.of_last(model.module, lambda: model.loss(batch | {name: ids}))
    return abs(losses[0] - losses[1]) > _ROUNDED * max(map(abs, losses)) if depends is None else depends


def _last_target(batch: Batch, alias: str) -> tuple[str, Tensor, Batch] | None:
    """The key of the words in the batch, the words (1, L) of the first row, and this row with only its last target.

    None if the rows are not texts in which each word is predicted from the words before it.
    """
    target = batch.get("labels")
    if not isinstance(target, Tensor) or target.dim() != 2 or target.is_floating_point():
        return None
    for name, words in batch.items():
        alike = isinstance(words, Tensor) and words.shape == target.shape and not words.is_floating_point()
        if name in ("labels", alias) or not alike or len(set(words[0].tolist())) < _LEAST:
            continue
        mask = batch.get("attention_mask")
        length = words.shape[1] if mask is None or mask.shape != words.shape else int(mask[0].sum())
        ids, wanted = words[:1, :length], target[:1, :length]
        for earlier in (0, 1):
            expected, there = ids[0, earlier:], wanted[0, : length - earlier]
            counts = there != IGNORE
            if int(counts.sum()) >= _LEAST and bool(counts[-1]) and bool((there == expected)[counts].all()):
                last = torch.full_like(wanted, IGNORE)
                last[0, length - earlier - 1] = there[-1]
                kept = {n: x[:1, :length] if _of_places(x, words) else x[:1] for n, x in batch.items() if _is_row(x)}
                return name, ids, kept | {"labels": last}
    return None


def _of_places(x: Tensor, words: Tensor) -> bool:
    return x.dim() > 1 and x.shape[:2] == words.shape


def _is_row(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0
