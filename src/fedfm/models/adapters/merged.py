"""Computes a linear map with LoRA as one product: y = x (W + s B A)^T + b, with gradients of x, A and B.

PEFT adds s B A x to the output of W x, which reads and writes each activation several more times. The sum W + s B A
costs r multiplications for each entry of W, for any number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.models.adapters import lora
from fedfm.models.model import Model


@contextmanager
def merge(model: Model) -> Iterator[None]:
    """Context manager: every linear map with LoRA and without active dropout computes with one matrix.

    The results equal PEFT's up to rounding.
    """
    with ExitStack() as stack:
        for path in lora.pairs(model.names):
            module: Any = model.module.get_submodule(path)
            if _plain(module):
                vars(module)["forward"] = lambda x, *_, m=module: _forward(m, x)
                stack.callback(vars(module).pop, "forward")
        yield


def _plain(module: Any) -> bool:
    """Whether the module computes y = W x + b + s B A x, in one dtype and without active dropout."""
    base, dropout = module.base_layer, module.lora_dropout["default"]
    return (
        type(base) is nn.Linear
        and (isinstance(dropout, nn.Identity) or not dropout.training)
        and not module.lora_variant
        and base.weight.dtype == module.lora_A["default"].weight.dtype
    )


def _forward(module: Any, x: Tensor) -> Tensor:
    base, (a, b) = module.base_layer, (getattr(module, f"lora_{f}")["default"].weight for f in "AB")
    return _Merged.apply(x, base.weight, base.bias, a, b, module.scaling["default"])  # type: ignore[no-any-return, no-untyped-call]


class _Merged(torch.autograd.Function):
    """The product y (..., n) of x (..., m), W (n, m), bias (n,), A (r, m) and B (n, r). W and the bias are frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, s: float) -> Tensor:
        ctx.s = s
        ctx.save_for_backward(x, weight, a, b)
        return F.linear(x, torch.addmm(weight, b, a, alpha=s), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, a, b = ctx.saved_tensors
        g, g_x, g_a, g_b = grads[0], None, None, None
        if ctx.needs_input_grad[0]:
            g_x = g @ torch.addmm(weight, b, a, alpha=ctx.s)
        g, x = g.flatten(0, -2), x.flatten(0, -2)
        if ctx.needs_input_grad[3]:
            g_a = (g @ (ctx.s * b)).T @ x
        if ctx.needs_input_grad[4]:
            g_b = g.T @ (x @ (ctx.s * a).T)
        return g_x, None, None, g_a, g_b, None
