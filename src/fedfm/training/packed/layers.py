"""One transformer layer on a packed batch, forward and backward by hand.

No gradients of frozen weights are computed, and no gradients below the lowest adapted layer. If the model reads only
the class token, the last layer computes only that token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.training.packed import attention, linear
from fedfm.training.packed.adapters import Adapted, Segment
from fedfm.training.packed.attention import Shape


@dataclass(frozen=True)
class Norm:
    """Frozen layer normalisation."""

    weight: Tensor
    bias: Tensor
    eps: float

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """(N, d) -> (N, d), and the values that the gradient needs."""
        y, mean, rstd = torch.native_layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return y, (x, mean, rstd)

    def backward(self, gradient: Tensor, saved: Any) -> Tensor:
        """dL/dy (N, d) -> dL/dx (N, d)."""
        x, mean, rstd = saved
        out: Tensor = linear.layer_norm_backward(
            gradient, x, self.weight.shape, mean, rstd, self.weight, self.bias, [True, False, False]
        )[0]
        return out


@dataclass(frozen=True)
class Layer:
    """Frozen weights and adapters of one layer.

    Attributes:
        qkv: queries (scaled by 1 / sqrt(d / H)), keys and values as one map (d -> 3d); with ``first_only`` two maps:
            one of the queries (d -> d), and one of keys and values (d -> 2d).
        before: True: normalise the inputs of attention and MLP (ViT); False: normalise each sum after them (BERT).
        first_only: whether the model reads only each sequence's first token of this layer's output.
        lowest: whether no layer below is trained, so that no gradient leaves this layer.
    """

    qkv: tuple[Adapted, ...]
    out: Adapted
    up: Adapted
    down: Adapted
    norm_1: Norm
    norm_2: Norm
    heads: int
    before: bool
    first_only: bool = False
    lowest: bool = False

    @property
    def maps(self) -> tuple[Adapted, ...]:
        """All linear maps."""
        return *self.qkv, self.out, self.up, self.down

    @property
    def low(self) -> bool:
        """Whether only bfloat16 products read the MLP's hidden values, which may then be bfloat16."""
        return self.down.base.low and not self.up.sites and not self.down.sites

    def forward(
        self, x: Tensor, shape: Shape, segments: Sequence[Segment], firsts: Sequence[Segment]
    ) -> tuple[Tensor, Any]:
        """(N, d) -> (N, d), or (S, d) with ``first_only``, one row for each of the S sequences.

        ``segments`` assign the N rows to clients, and ``firsts`` assign the S rows.
        """
        normed, n1 = self.norm_1.forward(x) if self.before else (x, None)
        o, residual, attended = self._attend(normed, x, shape, segments, firsts)
        segments = firsts if self.first_only else segments
        a, out = self.out.forward(o, segments)
        a.add_(residual)
        n, n2 = (self.norm_2 if self.before else self.norm_1).forward(a)
        u, up = self.up.forward(n, segments, low=self.low)
        h = F.gelu(u)
        y, down = self.down.forward(h, segments)
        y, n3 = (y.add_(a), None) if self.before else self.norm_2.forward(y.add_(n))
        return y, (attended, n1, n2, n3, o, out, n, u, up, h if self.down.sites else None, down)

    def backward(
        self, gradient: Tensor, saved: Any, shape: Shape, segments: Sequence[Segment], firsts: Sequence[Segment]
    ) -> Tensor | None:
        """dL/dy -> dL/dx (N, d), None in the lowest layer; the adapters' gradients go into the segments."""
        attended, n1, n2, n3, o, out, n, u, up, h, down = saved
        parts = firsts if self.first_only else segments
        gy = gradient if n3 is None else self.norm_2.backward(gradient, n3)
        gh = self.down.backward(gy, h, down, parts, need_input=True, low=self.low)
        gu = linear.gelu_backward(gh, u, grad_input=gh)  # in place: one buffer less in the cache
        gn = self.up.backward(gu, n, up, parts, need_input=True)
        assert gn is not None
        ga = self.norm_2.backward(gn, n2).add_(gy) if self.before else self.norm_1.backward(gn.add_(gy), n2)
        go = self.out.backward(ga, o, out, parts, need_input=True)
        assert go is not None
        gx = self._attend_backward(go, attended, shape, segments, firsts)
        if gx is None:
            return None
        if self.before:
            gx = self.norm_1.backward(gx, n1)
        if self.first_only:
            return gx.index_add_(0, shape.first, ga)
        return gx.add_(ga)

    def _attend(
        self, x: Tensor, residual: Tensor, shape: Shape, segments: Sequence[Segment], firsts: Sequence[Segment]
    ) -> tuple[Tensor, Tensor, Any]:
        if not self.first_only:
            qkv, hidden = self.qkv[0].forward(x, segments)
            o, saved = attention.forward(qkv, shape, self.heads)
            return o, residual, (x, hidden, saved)
        x0 = x.index_select(0, shape.first)
        q, hidden_q = self.qkv[0].forward(x0, firsts)
        kv, hidden_kv = self.qkv[1].forward(x, segments)
        o, saved = attention.forward_first(q, kv, shape, self.heads)
        return o, residual.index_select(0, shape.first), (x, x0, hidden_q, hidden_kv, saved)

    def _attend_backward(
        self, gradient: Tensor, attended: Any, shape: Shape, segments: Sequence[Segment], firsts: Sequence[Segment]
    ) -> Tensor | None:
        need = not self.lowest
        if not self.first_only:
            x, hidden, saved = attended
            g = attention.backward(gradient, saved, shape, self.heads)
            return self.qkv[0].backward(g, x, hidden, segments, need_input=need)
        x, x0, hidden_q, hidden_kv, saved = attended
        gq, gkv = attention.backward_first(gradient, saved, shape, self.heads)
        gx0 = self.qkv[0].backward(gq, x0, hidden_q, firsts, need_input=need)
        gx = self.qkv[1].backward(gkv, x, hidden_kv, segments, need_input=need)
        if gx is None or gx0 is None:
            return None
        return gx.index_add_(0, shape.first, gx0)
