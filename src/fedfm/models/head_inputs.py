"""What a model's head reads of its rows: one vector a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.models.row_batches import LARGE, by_length, fixed_batches

if TYPE_CHECKING:
    from fedfm.models.model import Model


def head_inputs(model: Model, head: nn.Linear, rows: Rows) -> Tensor:
    """The inputs of this layer (n, d), on the CPU."""
    rows, back = by_length(rows)
    large = sum(p.numel() for p in model.module.parameters()) >= LARGE
    caught: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    try:
        done = []
        with model.evaluating():
            for batch, n in fixed_batches(rows, large=large):
                model._outputs(batch)
                done.append(_pooled(model, caught.pop(), batch)[:n].float().cpu())
    finally:
        hook.remove()
    return torch.cat(done)[back] if done else torch.zeros(0, head.in_features)


def prompts(rows: Rows) -> Rows:
    """Instruction rows without their answers; other rows unchanged."""
    if "answer_start" not in rows.tensors or rows.tokens is None:
        return rows
    return Rows(tokens=rows.tokens.cut(rows.tensors["answer_start"].numpy()), pad=rows.pad)


def _pooled(model: Model, x: Tensor, batch: Batch) -> Tensor:
    """(b, T, d) -> (b, d) at the last real token, if the head is applied to every token."""
    if x.dim() != 3:
        return x
    last = torch.full((len(x),), x.shape[1] - 1, device=x.device)
    if "input_ids" in batch and model.tools.tokenizer is not None:
        real = batch["input_ids"].to(x.device) != model.tools.tokenizer.pad_token_id
        last = (torch.arange(x.shape[1], device=x.device) * real).argmax(-1)
    return x[torch.arange(len(x), device=x.device), last]
