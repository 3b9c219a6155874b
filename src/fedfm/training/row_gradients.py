"""Sums of clipped gradients of single rows, without one gradient for each row in memory where that is cheaper.

A linear layer's gradient for one row is G^T A, with the row's inputs A (T, i) and output gradients G (T, o). Its
squared norm is sum(A A^T * G G^T) (Goodfellow 2015, arXiv:1510.01799; Li, Tramer, Liang, Hashimoto. Large Language
Models Can Be Strong Differentially Private Learners. ICLR 2022, arXiv:2110.05679), and the clipped sum over rows is one
product (Bu, Wang, Zha, Karypis. Differentially Private Optimization on Large Model at Small Cost. ICML 2023,
arXiv:2210.00038). One backward pass finds all G and no gradient of a weight. Models with other trainable parameters,
and losses that are no sum over rows, take one backward pass for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedfm.core.rows import Rows
from fedfm.models.model import Model

_MARGIN = 1 - 1e-4  # rows are clipped to this times C: the rounding of a float32 sum stays within C

Pieces = dict[int, tuple[Tensor, Callable[[Tensor], Tensor]]]  # id of a parameter -> squared norms (b,), weighted sum


def factors(squared: Tensor, clip_norm: float) -> Tensor:
    """min(1, C / norm) of each row; 0 for a row whose gradient is not finite."""
    found = (clip_norm * _MARGIN / squared.sqrt()).clamp(max=1.0)
    return torch.where(squared.isfinite(), found, 0.0)


def clipped_sum(model: Model, rows: Rows, index: np.ndarray, clip_norm: float, live: dict[str, Tensor]) -> Tensor:
    """The sum (P,) over rows of their gradients, each scaled down to L2 norm C over all these parameters together.

    Args:
        rows: the client's.
        index: (b,) rows of the sum.
        live: the trained parameters.
    """
    batch = rows.batch(index)
    if model.task == "classification" and type(model).loss is Model.loss:
        found = _of_layers(model, batch, live, len(index))
        if found is not None:
            c = factors(torch.stack([squared for squared, _ in found.values()]).sum(0), clip_norm)
            return torch.cat([found[id(p)][1](c).reshape(-1) for p in live.values()]).cpu()
    total = torch.zeros(sum(p.numel() for p in live.values()))
    for i in index:
        loss = model.loss(rows.batch(np.array([i])))
        one = torch.autograd.grad(loss, list(live.values()), allow_unused=True)
        pairs = zip(one, live.values(), strict=True)
        g = torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]).float().cpu()
        c = factors(g.square().sum(), clip_norm)
        if c:
            total.add_(g, alpha=float(c))
    return total


def _of_layers(model: Model, batch: Any, live: dict[str, Tensor], b: int) -> Pieces | None:
    """Squared norms and weighted sums of each parameter; None if a parameter is in no layer of a known kind."""
    wanted = {id(p) for p in live.values()}
    with _watched(model.module, wanted) as seen:
        logits = model.logits(batch)
        loss = F.cross_entropy(*model.flat(logits, batch), reduction="sum")
    covered = [id(p) for module, *_ in seen for p in module.parameters(recurse=False) if id(p) in wanted]
    plain = len(covered) == len(wanted) == len(set(covered))  # each in one layer, that runs once
    if not plain or any(len(x) != b or x._version != version for _, x, version, _ in seen):
        return None
    gradients = torch.autograd.grad(loss, [edge for *_, edge in seen])
    found: Pieces = {}
    for (module, x, _, _), g in zip(seen, gradients, strict=True):
        found |= {i: piece for i, piece in _KINDS[type(module)](module, x, g).items() if i in wanted}
    return found if len(found) == len(wanted) else None


@contextmanager
def _watched(module: nn.Module, wanted: set[int]) -> Iterator[list[tuple[nn.Module, Tensor, int, Any]]]:
    """Collects (layer, input, the input's version, place of its output in the graph) of layers with such parameters."""
    seen: list[tuple[nn.Module, Tensor, int, Any]] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        x = args[0].detach()
        seen.append((layer, x, x._version, torch.autograd.graph.get_gradient_edge(out)))

    hooks = [
        layer.register_forward_hook(note)
        for layer in module.modules()
        if type(layer) in _KINDS and any(id(p) in wanted for p in layer.parameters(recurse=False))
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _linear(layer: Any, x: Tensor, g: Tensor) -> Pieces:
    return _product(layer, x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1]))


def _product(layer: Any, x: Tensor, g: Tensor) -> Pieces:
    """Of a weight (o, ...) with gradient sum_t g_t x_t^T, and a bias; x (b, T, i), g (b, T, o)."""
    x, g = x.float(), g.float()
    (_, t, i), o = x.shape, g.shape[2]
    if t > 1 and i * o <= t * (i + o):
        found = _summed(layer.weight, g.transpose(1, 2) @ x)
    else:
        products = (x @ x.transpose(1, 2)) * (g @ g.transpose(1, 2))
        found = {
            id(layer.weight): (
                products.sum((1, 2)).clamp_min(0),
                lambda c: _weighted(g, c).reshape(-1, o).T @ (x if c.all() else _weighted(x, c.sign())).reshape(-1, i),
            )
        }
    return found if layer.bias is None else found | _summed(layer.bias, g.sum(1))


def _summed(p: Tensor, rows: Tensor) -> Pieces:
    """Of a parameter with one gradient for each row (b, ...)."""
    rows = rows.float().reshape(len(rows), -1)
    return {id(p): (rows.square().sum(1), lambda c: c @ rows if c.all() else _weighted(rows, c).sum(0))}


def _weighted(g: Tensor, c: Tensor) -> Tensor:
    """The rows' gradients times c (b,); of rows with c = 0, which may not be finite, zeros."""
    c = c.reshape(-1, *[1] * (g.dim() - 1))
    return torch.where(c > 0, g * c, 0.0)


def _convolution(layer: Any, x: Tensor, g: Tensor) -> Pieces:
    if layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return {}
    columns = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (b, c k k, T)
    return _product(layer, columns.transpose(1, 2), g.flatten(2).transpose(1, 2))


def _layer_norm(layer: Any, x: Tensor, g: Tensor) -> Pieces:
    if layer.weight is None:
        return {}
    shape = layer.normalized_shape
    of = (len(x), -1, *shape)
    found = _summed(layer.weight, (g * F.layer_norm(x, shape, eps=layer.eps)).reshape(of).sum(1))
    return found if layer.bias is None else found | _summed(layer.bias, g.reshape(of).sum(1))


def _group_norm(layer: Any, x: Tensor, g: Tensor) -> Pieces:
    if layer.weight is None:
        return {}
    normal = F.group_norm(x, layer.num_groups, eps=layer.eps)
    of = (*x.shape[:2], -1)
    return _summed(layer.weight, (g * normal).reshape(of).sum(2)) | _summed(layer.bias, g.reshape(of).sum(2))


_KINDS: dict[type[nn.Module], Callable[[Any, Tensor, Tensor], Pieces]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}
