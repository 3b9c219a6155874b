"""FedBaF's whole-vector operations at the server: Algorithm 1, lines 9 and 11.

Sums run in float64: the norm of 10^8 entries in float32 has an error of one per cent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params

TINY = 1e-12  # a vector with a smaller norm has no direction
_PIECE = 1 << 15  # number of entries in float64 at a time; this many fit into the processor's caches


class Piece(NamedTuple):
    """The entries that are mixed into one tensor.

    Attributes:
        region: lengths of the leading slice that is mixed, one for each dimension.
        tensor: the entries, in the shape of the region.
    """

    region: tuple[int, ...]
    tensor: Tensor


def direction_distance(u: Params, w: Params, names: Collection[str] | None = None) -> float:
    """|| u/|u| - w/|w| ||_2 over the floating-point entries, or over ``names`` only: FedBaF, Algorithm 1, line 9.

    The computation takes one pass: |x/|x| - y/|y||^2 = (|x - y|^2 - (|x| - |y|)^2) / (|x| |y|). This loses no digits if
    u is close to w. The result is 0 if a norm is below :data:`TINY`, and not finite if an entry is not finite.

    Raises:
        KeyError: the names differ, or one of ``names`` is missing.
        ValueError: shapes or dtypes differ.

    Example:
        >>> w = Params({"w": torch.tensor([5.0, 0.0])})
        >>> u = Params({"w": torch.tensor([3.0, 4.0])})
        >>> direction_distance(u, w)
        0.894427190999916
    """
    u.check_like(w.layout)
    _check_names(u, names or ())
    chosen = [name for name in u if names is None or name in names]
    squares = [each for name in chosen for each in _squares(u[name], w[name])]
    a, b, c = (math.sqrt(math.fsum(column)) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0, 0.0)
    if a < TINY or b < TINY:
        return 0.0
    return math.sqrt(max((c - abs(a - b)) * (c + abs(a - b)) / (a * b), 0.0))


def _squares(u: Tensor, w: Tensor) -> Iterator[list[float]]:
    """Sum u^2, sum w^2 and sum (u - w)^2 of each block of entries, in float64; nothing for integer tensors."""
    if u.is_floating_point():
        for x, y in zip(torch.split(u.flatten(), _PIECE), torch.split(w.flatten(), _PIECE), strict=True):
            x, y = x.double(), y.double()
            yield [float(torch.dot(v, v)) for v in (x, y, x - y)]


def mix(u: Params, pieces: Mapping[str, Piece], a: float | Mapping[str, float | Tensor]) -> Params:
    """(u + a p) / (1 + a) in the regions of the pieces, u elsewhere: FedBaF, Algorithm 1, line 11.

    The result is computed as u/(1 + a) + p a/(1 + a) in float64 and rounded to u's dtype. Integer entries, and entries
    with a = 0, keep u's bits.

    Args:
        pieces: the entries to mix in, by parameter name.
        a: at least 0. One number for all names, or for each name a number or a tensor of the piece's shape. A
        parameter whose name is missing keeps u's bits.

    Raises:
        KeyError: u has no parameter of that name.
        ValueError: a region exceeds its tensor, ``p`` or ``a`` has another shape, or ``a`` is negative or not finite.

    Example:
        >>> u = Params({"w": torch.tensor([3.0, 4.0, 7.0])})
        >>> mix(u, {"w": Piece((2,), torch.tensor([-3.0, 6.0]))}, 1.0)["w"].tolist()
        [0.0, 5.0, 7.0]
    """
    _check_names(u, pieces)
    mixed = Params.from_flat(u.layout, {d: buffers.empty(len(flat), d).copy_(flat) for d, flat in u.flats.items()})
    for name, (region, p) in pieces.items():
        shape = tuple(u[name].shape)
        if len(region) != len(shape) or any(not 0 <= r <= n for r, n in zip(region, shape, strict=True)):
            raise ValueError(f"{name}: the region {tuple(region)} is not within {shape}")
        if tuple(p.shape) != tuple(region):
            raise ValueError(f"{name}: a piece of shape {tuple(p.shape)} for the region {tuple(region)}")
        a_of = _a_of(name, region, a)
        if u[name].is_floating_point() and not (isinstance(a_of, float) and a_of == 0):
            _mix(mixed[name][tuple(map(slice, region))], p.detach().cpu(), a_of)
    return mixed


def _mix(x: Tensor, p: Tensor, a: float | Tensor) -> None:
    """Replace x by the mixture, in blocks of rows."""
    x, p = (t if t.dim() else t.view(1) for t in (x, p))
    rows = max(1, _PIECE * len(p) // max(1, p.numel()))
    for at in range(0, len(p), rows):
        here = slice(at, at + rows)
        a_here = a[here].double() if isinstance(a, Tensor) else a
        own, other = 1 / (1 + a_here), a_here / (1 + a_here)
        x[here] = (x[here].double() * own).add_(p[here].double() * other)


def _a_of(name: str, region: tuple[int, ...], a: float | Mapping[str, float | Tensor]) -> float | Tensor:
    value = a.get(name, 0.0) if isinstance(a, Mapping) else a
    if isinstance(value, Tensor) and value.dim() > 0:
        if tuple(value.shape) != tuple(region):
            raise ValueError(f"{name}: a has shape {tuple(value.shape)}, expected {tuple(region)}")
        least = float(value.min()) if value.numel() else 0.0
    else:
        value = least = float(value)
    if not 0 <= least < math.inf:
        raise ValueError(f"{name}: a = {least}, expected a finite number of at least 0")
    return value


def _check_names(u: Params, names: Collection[str]) -> None:
    if extra := [name for name in names if name not in u]:
        raise KeyError(f"no such parameters: {sorted(extra)[:6]}")
