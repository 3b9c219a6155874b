"""The training loss of a language model, computed without storing all logits.

Logits and their gradients are the largest tensors of a step: for 2,048 tokens and a vocabulary of 128,000 they take
3.7 GB. So this loss computes one chunk of logits and its gradients, then the next chunk (like Liger Kernel,
arXiv:2410.10989, in Triton). No logits are kept, and none are computed twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.models.language.encoding import next_tokens
from fedfm.models.precision import reduced_precision
from fedfm.models.preprocessing import IGNORE

if TYPE_CHECKING:
    from fedfm.core.rows import Batch
    from fedfm.models.network import Network

PIECE = 1 << 26  # number of logits per chunk, 256 MB in float32; a batch with fewer logits uses the usual loss
_plain: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether a model's logits are its head's outputs


def mean_loss(model: Network, batch: Batch) -> Tensor | None:
    """Mean cross-entropy over the next tokens that count, a scalar; None if the usual loss has to be used.

    The usual loss is used if a batch has few logits, if no gradient is needed, or if the model changes its head's
    output (as Gemma 2 does, which bounds its logits).
    """
    head = model.last_layer
    if head is None or not torch.is_grad_enabled() or batch["input_ids"].numel() * head.out_features <= PIECE:
        return None
    if not _plain.get(model.module, True):
        return None
    states, unchanged = _last_states(model, head, batch)  # (b, L, d)
    if model.module not in _plain:
        _plain[model.module] = unchanged()
        if not _plain[model.module]:
            return None
    targets = next_tokens(batch).to(states.device)
    counts = targets != IGNORE  # (b, L - 1)
    parameters = [p for p in head.parameters() if p.requires_grad]
    total: Tensor = _Pieces.apply(  # type: ignore[no-untyped-call]
        states[:, :-1][counts],
        targets[counts],
        head,
        lambda: reduced_precision(model.spec.dtype, states.device),
        *parameters,
    )
    return total / counts.sum()


def _last_states(model: Network, head: nn.Module, batch: Batch) -> tuple[Tensor, Callable[[], bool]]:
    """The head's inputs, and a function that returns whether the head's outputs are the model's logits.

    In this forward pass the head computes the outputs of one token only.
    """
    seen: list[Tensor] = []

    def one(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(args[0])
        return (args[0][:1, :1].detach(), *args[1:])

    hooks = [
        head.register_forward_pre_hook(one),
        head.register_forward_hook(lambda module, args, out: seen.append(out)),
    ]
    try:
        given = model.logits(batch)
    finally:
        for hook in hooks:
            hook.remove()
    states, out = seen
    return states, lambda: torch.equal(given.detach().to(out.device, out.dtype), out.detach())


class _Pieces(torch.autograd.Function):
    """The sum of cross-entropies; the forward pass computes the gradients, too."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        head: nn.Linear,
        precision: Callable[[], AbstractContextManager[None]],
        *parameters: Tensor,
    ) -> Tensor:
        """The sum for states (m, d) and targets (m,), with the head and its trained parameters."""
        size = max(PIECE // head.out_features, 1)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        of_states, of_parameters = torch.zeros_like(states), [torch.zeros_like(p) for p in parameters]
        for at in range(0, len(states), size):
            piece = states[at : at + size].detach().requires_grad_()
            with torch.enable_grad():
                with precision():
                    logits = head(piece)
                loss = F.cross_entropy(logits.float(), targets[at : at + size].to(logits.device), reduction="sum")
                found = torch.autograd.grad(loss, [piece, *parameters])
            total += loss.detach().to(total.device)
            of_states[at : at + size] = found[0]
            for sum_, gradient in zip(of_parameters, found[1:], strict=True):
                sum_ += gradient
            del logits, loss, found
        ctx.save_for_backward(of_states, *of_parameters)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The stored gradients times the gradient of the sum."""
        of_states, *of_parameters = (found * gradients[0].to(found.device) for found in ctx.saved_tensors)
        return of_states, None, None, None, *of_parameters
