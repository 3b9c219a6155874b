"""Finds the positions of a text on which a model's outputs depend, by gradients with respect to token embeddings.

Comparing outputs for two texts would not show this. Even outputs that do not depend on the changed token may differ,
because a matrix product with other rows rounds differently. The gradient at a position on which an output does not
depend is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedfm.models import positions
from fedfm.models.families import unwrap
from fedfm.models.preprocessing import LOCAL_SHARE

if TYPE_CHECKING:
    from fedfm.models.network import Network

_READ = 8  # number of a text's tokens that ``reads_padding`` uses
_PADDING = 4  # number of padding tokens before the text


def of_places(module: nn.Module, compute: Callable[[], Tensor]) -> list[Tensor] | None:
    """For each position, whether the result of ``compute`` depends on the token there.

    Args:
        compute: calls the module, in evaluation mode.

    Returns:
        a mask (b, L) for each call of the embedding; None if the module has no table of token embeddings.
    """
    reads = positions.embedding(unwrap(module))
    if reads is None:
        return None
    embedded: list[Tensor] = []

    def follow(_: nn.Module, __: object, out: Tensor) -> Tensor:
        embedded.append(out.detach().requires_grad_())
        return embedded[-1].clone()  # some models scale embeddings in place, which autograd forbids for leaves

    hook = reads.register_forward_hook(follow)
    try:
        with torch.enable_grad():
            found = compute()
            factors = torch.rand(found.shape, generator=torch.Generator().manual_seed(0))
            gradients = torch.autograd.grad((found * factors.to(found)).sum(), embedded, allow_unused=True)
    finally:
        hook.remove()
    return [g.ne(0).any(-1) for g in gradients if g is not None]


def of_last(module: nn.Module, compute: Callable[[], Tensor]) -> bool | None:
    """Whether the result of ``compute`` depends on the last token; None if :func:`of_places` returns None."""
    found = of_places(module, compute)
    return None if found is None else any(bool(depends[..., -1].any()) for depends in found)


def reads_padding(model: Network, ids: Tensor, pad: int, share: Tensor | None = None) -> bool:
    """Whether the next token after a text depends on padding before the text, although the mask hides the padding.

    A recurrent model carries a state from token to token, and may read the padding before a text.

    Args:
        ids: (L,) the text's tokens.
        share: (1,) the weight of the client's own adapter for this text, if the model has a pair of adapters.
    """
    ids = ids[:_READ]
    padded = torch.cat([torch.full((_PADDING,), pad), ids])[None]  # (1, L)
    mask = torch.ones_like(padded)
    mask[:, :_PADDING] = 0
    batch = {"input_ids": padded, "attention_mask": mask} | ({} if share is None else {LOCAL_SHARE: share})
    with model.evaluating():
        found = of_places(model.module, lambda: model.outputs(batch)[0, -1].float())
    return found is None or any(bool(depends[..., :_PADDING].any()) for depends in found)
