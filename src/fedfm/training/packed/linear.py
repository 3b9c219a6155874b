"""Frozen linear maps by oneDNN, and gradients of activations. Only this module uses torch's private operators.

``torch.ops.mkldnn._linear_pointwise`` runs oneDNN's kernels, ``F.linear`` runs MKL's. On an AMD EPYC with AVX-512
oneDNN is 2.1 to 2.3 times as fast in float32 at every shape of a small transformer (16 to 5,000 rows), and 4.4 times as
fast in bfloat16. On an Intel Xeon both run at the processor's peak; without AMX, bfloat16 runs at half of the peak. The
processor's features decide which library is used. A measurement must not decide, since two processes with exact kernels
must use the same library.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 8  # oneDNN gains nothing with fewer rows
_ROWS = 256  # number of rows for which oneDNN arranges a weight

# Overloads are looked up once: the look-up takes the time of a small kernel.
gelu_backward = torch.ops.aten.gelu_backward.grad_input
layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
softmax_backward = torch.ops.aten._softmax_backward_data.default
tanh_backward = torch.ops.aten.tanh_backward.default


@functools.cache
def _pointwise() -> Any | None:
    """The linear map of oneDNN; None if this build of torch lacks it or it does not compute x W^T + b."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        op = torch.ops.mkldnn._linear_pointwise.default
        x, weight, bias = torch.arange(48.0).view(16, 3), torch.arange(6.0).view(2, 3), torch.ones(2)
        good = torch.equal(op(x, weight, bias, "none", [], ""), F.linear(x, weight, bias))
        good = good and torch.equal(op(x, weight.t().contiguous().t(), None, "none", [], ""), F.linear(x, weight))
    except (AttributeError, RuntimeError):
        return None
    return op if good else None


@functools.cache
def _pointwise_bfloat16() -> Any | None:
    """The same for bfloat16; None if the processor lacks the instructions, such as one without AVX-512."""
    if (op := _pointwise()) is None:
        return None
    try:
        x, weight = torch.ones(_FEW_ROWS, 2).bfloat16(), torch.ones(3, 2).bfloat16()
        op(x, torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return op


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x W^T + b: (n, in), (out, in), (out,) -> (n, out)."""
    op = _pointwise() if x.shape[0] >= _FEW_ROWS else None
    y: Tensor = F.linear(x, weight, bias) if op is None else op(x, weight, bias, "none", [], "")
    return y


class Linear:
    """y = x W^T + b with frozen W, and its gradient in x.

    Args:
        weight: (out, in), not copied.
        bias: (out,) or None.
        low: whether to multiply in bfloat16 and accumulate in float32; inputs and outputs are float32 by default.
    """

    __slots__ = ("_blocked", "bias", "low", "transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, low: bool) -> None:
        self.low = low
        self.weight = weight.detach().bfloat16() if low else weight.detach()  # (out, in)
        self.bias = None if bias is None else bias.detach().bfloat16() if low else bias.detach()  # (out,)
        self.transposed = self.weight.t()  # (in, out)
        # bfloat16 weights are stored twice in oneDNN's order, for forward and backward. That is 10 % faster, gives the
        # same bits, and takes the memory of one float32 weight. In float32 it would take twice that memory.
        self._blocked: dict[bool, Tensor] = {}

    def forward(self, x: Tensor, *, low: bool = False) -> Tensor:
        """(N, in) -> (N, out); ``low``: leave the output of a bfloat16 product in bfloat16."""
        return self._apply(x, self.weight, self.bias, low)

    def backward(self, gradient: Tensor, *, low: bool = False) -> Tensor:
        """(N, out) -> (N, in)."""
        return self._apply(gradient, self.transposed, None, low)

    def rows(self, start: int, stop: int) -> Linear:
        """The map to outputs start:stop."""
        return Linear(self.weight[start:stop], None if self.bias is None else self.bias[start:stop], self.low)

    def _apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, low: bool) -> Tensor:
        if not self.low:
            return product(x, weight, bias)
        op = _pointwise_bfloat16() if x.shape[0] >= _FEW_ROWS else None
        if op is None:
            y: Tensor = F.linear(x.bfloat16(), weight, bias)
        else:
            back = weight is self.transposed
            if back not in self._blocked:
                self._blocked[back] = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
            y = op(x.bfloat16(), self._blocked[back], bias, "none", [], "")
        return y if low else y.float()
