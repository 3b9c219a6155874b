"""Each row's gradient of one layer's parameters, stored as factors if they are cheaper than one gradient per row.

A linear layer's gradient for one row is G^T A: A (T, i) are the row's inputs, and G (T, o) its output gradients. The
gradient's squared norm is sum(A A^T * G G^T) (Goodfellow 2015, arXiv:1510.01799; Li, Tramer, Liang, Hashimoto. Large
Language Models Can Be Strong Differentially Private Learners. ICLR 2022, arXiv:2110.05679). The clipped sum over rows
is one product (Bu, Wang, Zha, Karypis. Differentially Private Optimization on Large Model at Small Cost. ICML
2023, arXiv:2210.00038). An embedding is a linear layer whose inputs are unit vectors. If a parameter is used more than
once, its terms are added, and its squared norm includes the cross terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Terms of one row may cancel, and rounding of their float32 products is relative to the terms, not to the result. So
# norms are upper bounds: a row may be clipped slightly too much, never too little.
_ROUNDING = 1e-6
_MOST = 2**25  # largest number of values in all rows' gradients of a layer of unknown kind


@dataclass(frozen=True)
class Whole:
    """One gradient for each row, (b, *shape)."""

    rows: Tensor


@dataclass(frozen=True)
class Outer:
    """sum_t g_t x_t^T, (o, i), of each row; g (b, T, o), x (b, T, i)."""

    g: Tensor
    x: Tensor


@dataclass(frozen=True)
class Picked:
    """sum_t e_t g_t^T of each row, where e_t is the unit vector at ids_t; ids (b, T), g (b, T, d)."""

    ids: Tensor
    g: Tensor


Term = Whole | Outer | Picked
Terms = list[tuple[nn.Parameter, Term]]


@dataclass(frozen=True)
class Use:
    """One call of a layer.

    Attributes:
        args, kwargs: the call's arguments; tensors are detached.
        out: a copy of its output, only for layers of unknown kinds.
        g: the gradient of the loss with respect to the output; its first axis b counts the rows.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: Tensor | None
    g: Tensor

    @property
    def x(self) -> Tensor:
        """The layer's first input."""
        first: Tensor = self.args[0] if self.args else next(iter(self.kwargs.values()))
        return first


class Gradient:
    """The gradients of one parameter for all rows (b,) of a batch.

    Args:
        terms: terms for which :func:`fit` holds.

    Attributes:
        squared: (b,) squared norms, each rounded up.
    """

    def __init__(self, p: Tensor, terms: Sequence[Term], b: int) -> None:
        self._shape, self._b = p.shape, b
        self._outer, self._picked, self._whole = _merge(terms)
        self.squared = self._squares().to(p.device)

    def _squares(self) -> Tensor:
        if self._whole is not None:
            return self._whole.flatten(1).square().sum(1)
        outer, picked = self._outer, self._picked
        found, parts = torch.zeros(()), torch.zeros(())
        if outer is not None:
            found = found + ((outer.x @ outer.x.mT) * (outer.g @ outer.g.mT)).sum((1, 2))
            parts = parts + (outer.x.norm(dim=2) * outer.g.norm(dim=2)).sum(1)
        if picked is not None:
            same = picked.ids[:, :, None] == picked.ids[:, None]
            found = found + ((picked.g @ picked.g.mT) * same).sum((1, 2))
            parts = parts + picked.g.norm(dim=2).sum(1)
        if outer is not None and picked is not None:
            there = outer.g.gather(2, picked.ids[:, None].expand(-1, outer.g.shape[1], -1))  # (b, T, T')
            found = found + 2 * (there * (outer.x @ picked.g.mT)).sum((1, 2))
        if not found.dim():
            return torch.zeros(self._b)
        return found.clamp_min(0) + _ROUNDING * parts.square()

    def weighted_sum(self, c: Tensor) -> Tensor:
        """sum_i c_i times row i's gradient, flat; rows with c_i = 0 need not be finite."""
        outer, picked, whole = self._outer, self._picked, self._whole
        if whole is not None:
            rows = whole.flatten(1)
            return c @ rows if c.all() else _times(rows, c).sum(0)
        total = torch.zeros(self._shape, device=c.device)
        if outer is not None:
            g = _times(outer.g, c).flatten(0, 1)
            x = outer.x if c.all() else _times(outer.x, c.sign())
            total = g.mT @ x.flatten(0, 1)
        if picked is not None:
            g = _times(picked.g, c).flatten(0, 1)
            total = total.index_add(0, picked.ids.flatten(), g)
        return total.reshape(-1)


def fit(terms: Sequence[Term]) -> bool:
    """Whether the norm of the terms' sum is known: an embedding may share its weight only with linear layers."""
    return len({type(t) for t in terms} & {Picked, Whole}) < 2


def _merge(terms: Sequence[Term]) -> tuple[Outer | None, Picked | None, Tensor | None]:
    """Merge terms into as few as possible.

    The result is one gradient per row if that is less work, or if a term already has that form.
    """
    outer = [t for t in terms if isinstance(t, Outer)]
    picked = [t for t in terms if isinstance(t, Picked)]
    whole = [t.rows for t in terms if isinstance(t, Whole)]
    one = Outer(torch.cat([t.g for t in outer], 1), torch.cat([t.x for t in outer], 1)) if outer else None
    if picked:
        return one, Picked(torch.cat([t.ids for t in picked], 1), torch.cat([t.g for t in picked], 1)), None
    if one is not None:
        (_, t, o), i = one.g.shape, one.x.shape[2]
        if not whole and (t == 1 or i * o > t * (i + o)):
            return one, None, None
        whole.append((one.g.mT @ one.x).reshape(whole[0].shape if whole else (-1, o, i)))
    return None, None, torch.stack(whole).sum(0) if len(whole) > 1 else whole[0] if whole else None


def _times(g: Tensor, c: Tensor) -> Tensor:
    """The rows of g times c (b,). Rows with c = 0 become zeros, even if they are not finite."""
    c = c.reshape(-1, *[1] * (g.dim() - 1))
    return torch.where(c > 0, g * c, 0.0)


# --- kinds of layers --------------------------------------------------------------------------------------------------
def has_closed_form(layer: nn.Module) -> bool:
    """Whether :func:`terms` needs no second computation of the layer."""
    if isinstance(layer, nn.Conv2d) and (layer.groups > 1 or layer.padding_mode != "zeros" or layer.padding == "same"):
        return False
    if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm is not None):
        return False
    return _name(layer) in _KINDS


def terms(use: Use) -> Terms | None:
    """The terms of each of the layer's own parameters from one call; None if they are unknown."""
    return _KINDS[_name(use.layer)](use.layer, use.x, use.g) if has_closed_form(use.layer) else _recompute(use)


def _name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _linear(layer: Any, x: Tensor, g: Tensor) -> Terms:
    """Terms of a weight (o, i) with gradient sum_t g_t x_t^T, and of a bias; x (b, ..., i), g (b, ..., o)."""
    x, g = (t.float().reshape(len(t), -1, t.shape[-1]) for t in (x, g))
    return [(layer.weight, Outer(g, x)), *_shift(layer.bias, g.sum(1))]


def _conv1d(layer: Any, x: Tensor, g: Tensor) -> Terms:
    """Terms of a transposed weight (i, o), as in GPT-2."""
    x, g = (t.float().reshape(len(t), -1, t.shape[-1]) for t in (x, g))
    return [(layer.weight, Outer(x, g)), *_shift(layer.bias, g.sum(1))]


def _shift(bias: nn.Parameter | None, rows: Tensor) -> Terms:
    return [] if bias is None else [(bias, Whole(rows.float()))]


def _convolution(layer: Any, x: Tensor, g: Tensor) -> Terms:
    padding = 0 if layer.padding == "valid" else layer.padding
    columns = F.unfold(x.float(), layer.kernel_size, layer.dilation, padding, layer.stride)  # (b, c k k, T)
    return _linear(layer, columns.mT, g.flatten(2).mT)


def _embedding(layer: Any, ids: Tensor, g: Tensor) -> Terms:
    ids, g = ids.reshape(len(ids), -1), g.float().reshape(len(g), -1, g.shape[-1])
    if layer.padding_idx is not None:
        g = torch.where((ids == layer.padding_idx)[:, :, None], 0.0, g)
    return [(layer.weight, Picked(ids, g))]


def _layer_norm(layer: Any, x: Tensor, g: Tensor) -> Terms:
    shape, of = layer.normalized_shape, (len(x), -1, *layer.normalized_shape)
    scale = (g * F.layer_norm(x, shape, eps=layer.eps)).float().reshape(of).sum(1)
    return [(layer.weight, Whole(scale)), *_shift(layer.bias, g.float().reshape(of).sum(1))]


def _group_norm(layer: Any, x: Tensor, g: Tensor) -> Terms:
    normal, of = F.group_norm(x, layer.num_groups, eps=layer.eps), (*x.shape[:2], -1)
    scale = (g * normal).float().reshape(of).sum(2)
    return [(layer.weight, Whole(scale)), *_shift(layer.bias, g.float().reshape(of).sum(2))]


def _recompute(use: Use) -> Terms | None:
    """Terms of any other layer: compute it again for each row with torch.func.vmap.

    None if a row alone does not give the same result: the layer is random, mixes rows, or hides its inputs.
    """
    own = {name: p for name, p in use.layer.named_parameters(recurse=False) if p.requires_grad}
    params = {name: p.detach() for name, p in own.items()}
    given: dict[Any, Any] = {**dict(enumerate(use.args)), **use.kwargs}  # arguments by position or name
    b = len(use.g)
    plain = (Tensor, int, float, bool, str, type(None))
    if use.out is None or not all(isinstance(a, plain) for a in given.values()):
        return None
    if b * sum(p.numel() for p in params.values()) > _MOST:
        return None
    of_rows = {k: a for k, a in given.items() if isinstance(a, Tensor) and a.dim() and len(a) == b}

    def row(inputs: dict[Any, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        now = given | {k: x[None] for k, x in inputs.items()}
        args, kwargs = tuple(now[k] for k in range(len(use.args))), {k: now[k] for k in use.kwargs}

        def out_of(p: dict[str, Tensor]) -> Tensor:
            out: Tensor = torch.func.functional_call(use.layer, p, args, kwargs)
            return out

        pair: Any = torch.func.vjp(out_of, params)
        return pair[0][0], pair[1](g[None])[0]

    try:
        out, rows = torch.vmap(row)(of_rows, use.g)
    except (RuntimeError, ValueError, TypeError, IndexError):  # e.g. it branches on the values of a row
        return None
    if out.shape != use.out.shape or not torch.allclose(out, use.out, rtol=1e-3, atol=1e-5, equal_nan=True):
        return None
    return [(own[name], Whole(g.float())) for name, g in rows.items()]


_KINDS: dict[str, Callable[[Any, Tensor, Tensor], Terms]] = {
    "torch.nn.modules.linear.Linear": _linear,
    "torch.nn.modules.conv.Conv2d": _convolution,
    "torch.nn.modules.sparse.Embedding": _embedding,
    "torch.nn.modules.normalization.LayerNorm": _layer_norm,
    "torch.nn.modules.normalization.GroupNorm": _group_norm,
    "transformers.pytorch_utils.Conv1D": _conv1d,
}
