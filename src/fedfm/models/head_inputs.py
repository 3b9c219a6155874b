"""The inputs of a model's head: one vector per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.models import pooling
from fedfm.models.row_batches import LARGE, by_length, fixed_batches

if TYPE_CHECKING:
    from fedfm.models.network import Network

UNIT_NORM = "features divided by their Euclidean norm"  # name of this transform in an export


def head_inputs(model: Network, head: nn.Linear, rows: Rows) -> Tensor:
    """The inputs (n, d) of this head, one vector for each row, on the CPU.

    Raises:
        InputError: a classifier's head does not compute its logits from one vector per row.
    """
    rows, back = by_length(rows)
    large = sum(p.numel() for p in model.module.parameters()) >= LARGE
    caught: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        done: list[Tensor] = []
        with model.evaluating():
            for batch, n in fixed_batches(rows, large=large):
                logits = model.outputs(batch)
                pooled = _pool(model, head, caught.pop(), batch, rows)
                if head is model.head and not done:
                    pooling.check_agrees(model, head, pooled, logits)
                done.append(pooled[:n].float().cpu())
    finally:
        hook.remove()
    return torch.cat(done)[back] if done else torch.zeros(0, head.in_features)


def _pool(model: Network, head: nn.Linear, x: Tensor, batch: Batch, rows: Rows) -> Tensor:
    """If a head reads every token, pool its inputs (b, T, d) to (b, d); other inputs stay unchanged.

    A classifier's inputs are pooled as it pools them for its logits. A language model's are those of the last token.
    """
    if x.dim() != 3:
        return x
    if head is not model.head:
        return pooling.last(x, batch, pooling.padding(model))
    if model.pool is None:
        model.pool = pooling.way_of(model, head, rows)
    return model.pool(x, batch, pooling.padding(model))
