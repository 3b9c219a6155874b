"""The inputs and outputs of each block of a model, for all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedfm.core.rows import Rows
from fedfm.models.row_batches import fixed_batches

if TYPE_CHECKING:
    from fedfm.models.network import Network


def blocks(model: Network, rows: Rows) -> list[Tensor]:
    """The first block's input b_0 and the block outputs b_1 ... b_L, each (n, T, d), on the CPU.

    Rows of unequal length are padded to the longest; outputs of convolutions (n, d, H, W) have T = H W.

    Raises:
        ValueError: the blocks of this architecture are unknown, or one of them runs more than once.
    """
    if not model.parts.blocks:
        raise ValueError("the blocks of this architecture are unknown")
    caught: list[list[Tensor]] = [[] for _ in range(len(model.parts.blocks) + 1)]

    def keep(level: int, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x
        x = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x
        caught[level].append(x.float().cpu())

    modules = [block for _, block in model.parts.blocks]
    hooks = [
        modules[0].register_forward_pre_hook(lambda _, a, k: keep(0, a or next(iter(k.values()))), with_kwargs=True)
    ]
    hooks += [m.register_forward_hook(lambda _, a, y, i=i: keep(i, y)) for i, m in enumerate(modules, 1)]
    try:
        with model.evaluating():
            for done, (batch, n) in enumerate(fixed_batches(rows.to_padded()), 1):
                model.outputs(batch)
                if any(len(level) != done for level in caught):
                    raise ValueError("a block of this architecture runs more than once: its outputs have no order")
                for level in caught:
                    level[-1] = level[-1][:n]
    finally:
        for hook in hooks:
            hook.remove()
    return [torch.cat(level) if level else torch.zeros(0, 0, 0) for level in caught]
