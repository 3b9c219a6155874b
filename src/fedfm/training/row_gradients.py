"""Sums of clipped gradients of single rows, by one backward pass per batch if possible, else by one pass per row.

A forward pass records the inputs of every layer with a trained parameter. A backward pass computes only the gradients
of these layers' outputs, not of weights. :mod:`fedfm.training.row_terms` computes norms and weighted sums from these
inputs and gradients. This is right only if the model computes each row independently. Two checks ensure this:
:func:`agrees` compares a batch with single rows, and a tensor is split into rows only if its first axis is certainly
the axis of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedfm.core.rows import Batch, Rows
from fedfm.models.model import Model
from fedfm.training.row_terms import Gradient, Term, Use, fit, has_closed_form, terms

_MARGIN = 1 - 1e-4  # rows are clipped to this share of C, so that C holds despite rounding in float32 sums
_SAME = 1e-3  # largest relative difference between a row's gradients in a batch and alone

Live = dict[str, Tensor]


class Ambiguous(Exception):
    """A tensor has the batch's size on a second axis, so the axis of rows is ambiguous."""


def factors(squared: Tensor, clip_norm: float) -> Tensor:
    """min(1, C / norm) of each row; 0 for a row whose gradient is not finite."""
    found = (clip_norm * _MARGIN / squared.sqrt()).clamp(max=1.0)
    return torch.where(squared.isfinite(), found, 0.0)


def clipped_sum(
    model: Model, rows: Rows, index: np.ndarray, clip_norm: float, live: Live, by_layers: bool = True
) -> Tensor:
    """The sum (P,) of the rows' gradients. Each is scaled down to L2 norm C; the norm is over all these parameters.

    Args:
        rows: the client's rows.
        index: (b,) rows of the sum.
        live: the trained parameters.
        by_layers: whether one backward pass may serve all rows; False: one pass per row.
    """
    if by_layers:
        try:
            found = _of_layers(model, rows.batch(index), live, len(index))
        except Ambiguous:
            parts = np.array_split(index, 2)
            return torch.stack([clipped_sum(model, rows, part, clip_norm, live) for part in parts]).sum(0)
        if found is not None:
            c = factors(torch.stack([of.squared for of in found]).sum(0), clip_norm)
            return torch.cat([of.weighted_sum(c) for of in found]).cpu()
    total = torch.zeros(sum(p.numel() for p in live.values()))
    for i in index:
        g = _alone(model, rows, i, live)
        c = factors(g.square().sum(), clip_norm)
        if c:
            total.add_(g, alpha=float(c))
    return total


def agrees(model: Model, rows: Rows, index: np.ndarray, live: Live) -> bool:
    """Whether the first row's gradient is the same in this batch and alone, in evaluation mode.

    The gradient differs if the model mixes the rows of a batch, or uses a parameter outside the layer that owns it.
    """
    training = [m for m in model.module.modules() if m.training]
    model.module.eval()
    try:
        found = _of_layers(model, rows.batch(index), live, len(index))
        if found is None:
            return False
        c = (torch.arange(len(index)) == 0).float().to(found[0].squared.device)
        alone, together = _alone(model, rows, index[0], live), torch.cat([of.weighted_sum(c) for of in found]).cpu()
        return not alone.isfinite().all() or bool((together - alone).norm() <= _SAME * alone.norm())
    except Ambiguous:
        return all(agrees(model, rows, part, live) for part in np.array_split(index, 2))
    finally:
        for m in training:
            m.training = True


def _alone(model: Model, rows: Rows, i: int, live: Live) -> Tensor:
    """The gradient (P,) of one row, on the CPU."""
    one = torch.autograd.grad(model.loss(rows.batch(np.array([i]))), list(live.values()), allow_unused=True)
    pairs = zip(one, live.values(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs]).float().cpu()


def _losses(model: Model, batch: Batch) -> Tensor:
    """The sum of the losses of the single rows; a language model's row loss is the mean over its own tokens."""
    sums, counts = model.task.row_losses(model, batch)
    return (sums / counts.clamp_min(1)).sum()


@dataclass
class _Call:
    """A call of a layer, before the backward pass."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    out: Tensor | None
    edge: Any

    @property
    def tensor_inputs(self) -> list[Tensor]:
        """The inputs that are tensors."""
        return [a for a in (*self.args, *self.kwargs.values()) if isinstance(a, Tensor)]


def _of_layers(model: Model, batch: Batch, live: Live, b: int) -> list[Gradient] | None:
    """For each parameter the gradients of all rows; None if one backward pass cannot compute them.

    Raises:
        Ambiguous: it is unclear which values belong to a row.
    """
    if type(model).loss is not Model.loss or not model.softmax:
        return None
    wanted = {id(p) for p in live.values()}
    with _watch(model.module, wanted, b) as seen:
        loss = _losses(model, batch)
    covered = {id(p) for call in seen for p in call.layer.parameters(recurse=False)}
    if not wanted <= covered:
        return None
    if any(call.edge is None or [x._version for x in call.tensor_inputs] != call.versions for call in seen):
        return None  # several outputs, or inputs that have changed in place since
    gradients = torch.autograd.grad(loss, [call.edge for call in seen], allow_unused=True)
    found: dict[int, list[Term]] = {i: [] for i in wanted}
    for call, g in zip(seen, gradients, strict=True):
        if g is None:  # the loss does not depend on this call
            continue
        if not _by_rows(call, g, b):
            return None
        got = terms(Use(call.layer, call.args, call.kwargs, call.out, g))
        if got is None:
            return None
        for p, term in got:
            if id(p) in wanted:
                found[id(p)].append(term)
    if not all(fit(of) for of in found.values()):
        return None
    return [Gradient(p, found[id(p)], b) for p in live.values()]


def _by_rows(call: _Call, g: Tensor, b: int) -> bool:
    """Whether the first axis of the layer's input and output is the axis of rows.

    Raises:
        Ambiguous: another axis has the same size.
    """
    if not call.tensor_inputs or len(call.tensor_inputs[0]) != b or len(g) != b:
        return False
    x = call.tensor_inputs[0]
    if b > 1 and not isinstance(call.layer, nn.Conv2d | nn.GroupNorm):  # these require rows on the first axis
        places = x.shape[1:-1] if x.is_floating_point() else x.shape[1:]
        if b in places or b in g.shape[1:-1]:
            raise Ambiguous
    return True


@contextmanager
def _watch(module: nn.Module, wanted: set[int], b: int) -> Iterator[list[_Call]]:
    """Collect the calls of layers that own wanted parameters, with the autograd edge of each output."""
    seen: list[_Call] = []

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if isinstance(out, Tensor) and not out.requires_grad:
            return
        edge = torch.autograd.graph.get_gradient_edge(out) if isinstance(out, Tensor) else None
        args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
        kwargs = {k: a.detach() if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        call = _Call(
            layer, args, kwargs, [], None if edge is None or has_closed_form(layer) else out.detach().clone(), edge
        )
        call.versions = [x._version for x in call.tensor_inputs]
        seen.append(call)

    def spread(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Expand positions (1, T), which are often looked up once for all rows, to one look-up per row."""
        return tuple(ids.expand(b, *ids.shape[1:]) if ids.dim() > 1 and len(ids) == 1 else ids for ids in args)

    layers = [m for m in module.modules() if any(id(p) in wanted for p in m.parameters(recurse=False))]
    hooks = [m.register_forward_hook(note, with_kwargs=True) for m in layers]
    hooks += [m.register_forward_pre_hook(spread) for m in layers if isinstance(m, nn.Embedding)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
