"""Checks that a language model does not see the words that it predicts, which would give a low loss without learning.

Some classes of transformers have a language head and attend in both directions, and no setting reveals all of them. So
the check runs the model twice: if only the last word of a text changes, the logits before it must not change. A server
that has not loaded the weights checks only the first block, with random weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedfm.core.rows import Rows
from fedfm.core.tokens import Tokens
from fedfm.errors import InputError
from fedfm.models import influence, positions
from fedfm.models.families import unwrap

if TYPE_CHECKING:
    from fedfm.models.model import Model

_LONGEST = 32  # number of tokens that the check computes: enough, and cheap
_FEW = 6  # number of tokens for the check of a model without its weights
_SIZE = 0.1  # standard deviation of the random weights


def refuse(model: Model, rows: Rows) -> None:
    """Refuse a language model whose logits at a position depend on later words.

    Args:
        rows: a few training rows; at most 32 tokens of the longest are computed.

    Raises:
        InputError: the logits depend on later words.
    """
    if rows.tokens is None or rows.longest < 2:
        return
    ids = max(rows.tokens, key=len)[:_LONGEST]
    with model.evaluating():
        one, other = (_logits(model, text)[:-1] for text in (ids, _ends_otherwise(ids)))
    if torch.equal(one.nan_to_num(), other.nan_to_num()) or not _depend(model, ids):
        return
    raise _error(model)


def refuse_hollow(model: Model) -> None:
    """As :func:`refuse`, but for a language model without its weights.

    It checks whether the first block's output for a word depends on a later word. If no blocks were found, it checks
    the whole model.

    Raises:
        InputError: the output for a word depends on a later word.
    """
    words = positions.embedding(unwrap(model.module))
    if not model.is_language_model or words is None:
        return
    ids = (len(words.weight) // 2 + torch.arange(_FEW))[None] % len(words.weight)  # (1, L), far from the padding's id
    path, block = next(iter(model.parts.blocks), ("", model.module))
    with model.evaluating(), _random_weights(model, path):
        found = influence.of_last(model.module, lambda: _output_of(block, model.module, ids)[:-1])
    if found:
        raise _error(model)


class _Stop(Exception):
    """Ends a forward pass after a module, and carries the module's output."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def _output_of(block: nn.Module, module: nn.Module, ids: Tensor) -> Tensor:
    """The output (L, d) of ``block``, which is a part of the module, for these tokens (1, L)."""

    def stop(_: nn.Module, __: object, out: Any) -> None:
        raise _Stop(out)

    hook = block.register_forward_hook(stop)
    try:
        module(input_ids=ids)
    except _Stop as reached:
        out = reached.found
        whole: Tensor = out if isinstance(out, Tensor) else out.logits if hasattr(out, "logits") else out[0]
        return whole.squeeze(1 if whole.shape[1] == 1 else 0)  # XLNet's blocks take (L, 1, d)
    finally:
        hook.remove()
    raise RuntimeError("the model does not run its first block")


@contextmanager
def _random_weights(model: Model, path: str) -> Iterator[None]:
    """Context manager: the block at this path and all parts outside blocks have random weights.

    All values of such a tensor lie in a small block of memory.
    """
    blocks, draws = [name for name, _ in model.parts.blocks if name != path], torch.Generator().manual_seed(0)
    replaced = list[tuple[nn.Module, str, nn.Parameter]]()
    for place, part in unwrap(model.module).named_modules():
        if any(f"{place}.".startswith(f"{name}.") for name in blocks):
            continue
        for name, p in part.named_parameters(recurse=False):
            if not p.requires_grad and p.is_floating_point():
                line = (torch.randn(sum(p.shape) + 1, generator=draws) * _SIZE).to(p.dtype)
                replaced.append((part, name, p))
                part._parameters[name] = nn.Parameter(line.as_strided(p.shape, (1,) * p.dim()), requires_grad=False)
    try:
        yield
    finally:
        for part, name, p in replaced:
            part._parameters[name] = p


def _error(model: Model) -> InputError:
    config = getattr(unwrap(model.module), "config", None)
    setting = ""
    if getattr(config, "causal", None) is False:
        setting = ', or "causal": true in its config.json if it was trained so'
    kind = getattr(config, "model_type", type(unwrap(model.module)).__name__)
    return InputError(
        f"model.name: {model.spec.name!r} is of type {kind!r}, which sees the words that it predicts: its logits for "
        f'a word change with a later one; model.task = "{model.task}" needs a causal model, such as a llama or a '
        f"gpt2{setting}"
    )


def _logits(model: Model, ids: Tensor) -> Tensor:
    """The logits (L, V) of one text."""
    return model.logits(Rows(tokens=Tokens.of([ids])).batch([0]))[0].float()


def _ends_otherwise(ids: Tensor) -> Tensor:
    """The same tokens with another last token: another token of the text, or a neighbouring id if there is none."""
    others = ids[ids != ids[-1]]
    end = others[0] if len(others) else (ids[-1] - 1).abs()
    return torch.cat([ids[:-1], end[None]])


def _depend(model: Model, ids: Tensor) -> bool:
    """Whether the logits before the last token have a gradient with respect to the last token's embedding.

    Values alone do not show a dependence: with another last token, experts may group the earlier tokens differently,
    and so round them differently.
    """
    with model.evaluating():
        return influence.of_last(model.module, lambda: _logits(model, ids)[:-1]) is not False
