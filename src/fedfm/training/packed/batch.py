"""The rows of one forward and backward pass, of one or several clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm.training.packed.adapters import RowSegment, Segment
from fedfm.training.packed.attention import Shape
from fedfm.training.packed.linear import tanh_backward
from fedfm.training.packed.net import Net
from fedfm.training.packed.prefix import Prefix, split


class Batch:
    """Rows of all clients, one client after the other.

    Args:
        index: for each client, the indexes of its rows.
        weights, gradients: for each client, its trained tensors and the tensors that receive their gradients; entries
            beyond the clients of ``index`` are ignored.
        fused: whether to compute attention in compiled loops, which round differently.
        by_row: whether to compute the gradient of each row's loss, (b, ...); the batch then has rows of one client.
    """

    def __init__(
        self,
        net: Net,
        prefixes: Sequence[Prefix],
        index: Sequence[np.ndarray],
        weights: Sequence[dict[str, Tensor]],
        gradients: Sequence[dict[str, Tensor]],
        fused: bool = False,
        by_row: bool = False,
    ) -> None:
        lengths = [prefix.length[i] for prefix, i in zip(prefixes, index, strict=True)]
        self.net, self.shape = net, Shape(np.concatenate(lengths), fused)
        rows, firsts = split([int(n.sum()) for n in lengths]), split([len(n) for n in lengths])
        owners = list(zip(weights, gradients, strict=True))[: len(index)]
        self.segments = [Segment(*where, *own) for where, own in zip(rows, owners, strict=True)]
        self.firsts = [Segment(*where, *own) for where, own in zip(firsts, owners, strict=True)]
        if by_row:
            (whole,), (first,), ((w, gradient),) = rows, firsts, owners
            self.segments = [RowSegment(*whole, w, gradient, None if self.shape.equal else _places(lengths[0]))]
            self.firsts = [RowSegment(*first, w, gradient, None)]
        self.x = torch.empty(self.shape.rows, net.width)  # (N, d)
        self.x[self.shape.tokens :] = 0
        for prefix, i, (a, b) in zip(prefixes, index, rows, strict=True):
            prefix.put(i, self.x[a:b])

    def descend(self, targets: Sequence[Tensor]) -> list[float]:
        """Write the gradient of each client's mean loss; return each client's sum of losses."""
        x, kept = self.x, []
        layers = self.net.layers[self.net.lowest :]
        for layer in layers:
            x, saved = layer.forward(x, self.shape, self.segments, self.firsts)
            kept.append(saved)
        z, pooled = self._pool(x)
        gz = torch.empty_like(z)  # (S, d)
        losses = [_head(self.net, z, gz, s, y) for s, y in zip(self.firsts, targets, strict=True)]
        gradient: Tensor | None = self._unpool(gz, pooled)
        for layer, saved in zip(reversed(layers), reversed(kept), strict=True):
            assert gradient is not None
            gradient = layer.backward(gradient, saved, self.shape, self.segments, self.firsts)
        return losses

    def logits(self) -> Tensor:
        """(S, C) for the rows of a single client, in order, without gradients."""
        x = self.x
        for layer in self.net.layers[self.net.lowest :]:
            x = layer.forward(x, self.shape, self.segments, self.firsts)[0]
        w = self.segments[0].w
        return torch.addmm(w[self.net.head[1]], self._pool(x)[0], w[self.net.head[0]].t())

    def _pool(self, x: Tensor) -> tuple[Tensor, Any]:
        """Pool the last layer's output x to (S, d); x is (N, d), or (S, d) if it has only first tokens."""
        if self.net.pooler is not None:
            z = torch.tanh(self.net.pooler.forward(x))
            return z, z
        assert self.net.norm is not None
        y, saved = self.net.norm.forward(x)
        return (y.view(-1, self.shape.equal, y.shape[1]).mean(1) if self.net.mean else y), saved

    def _unpool(self, gz: Tensor, saved: Any) -> Tensor:
        if self.net.pooler is not None:
            return self.net.pooler.backward(tanh_backward(gz, saved))
        assert self.net.norm is not None
        if self.net.mean:
            gz = (gz / self.shape.equal).repeat_interleave(self.shape.equal, 0)
        return self.net.norm.backward(gz, saved)


def _places(lengths: np.ndarray) -> Tensor:
    """Positions (b, T) of each row's tokens in the batch. A shorter row is padded with the position after all rows."""
    at, starts = np.arange(lengths.max()), np.cumsum(lengths) - lengths
    return torch.from_numpy(np.where(at < lengths[:, None], starts[:, None] + at, lengths.sum()))


def _head(net: Net, z: Tensor, gz: Tensor, s: Segment, y: Tensor) -> float:
    """Summed cross-entropy of one client's rows; the gradients of the mean go into the segment and ``gz``."""
    weight, bias = s.w[net.head[0]], s.w[net.head[1]]
    part = z[s.start : s.stop]
    error = torch.log_softmax(torch.addmm(bias, part, weight.t()), 1)  # (b, C)
    picked = y[:, None]
    loss = -float(error.gather(1, picked).sum())
    error.exp_().scatter_add_(1, picked, error.new_full(picked.shape, -1.0)).div_(s.mean_of(len(y)))
    s.outer(net.head[0], error, part)
    s.total(net.head[1], error)
    torch.mm(error, weight, out=gz[s.start : s.stop])
    return loss
