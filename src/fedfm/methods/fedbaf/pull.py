"""What a server computes over whole parameter vectors, each reading memory once: FedBaF's lines 9 and 11.

A step on 10^8 parameters is bounded by memory traffic, so what counts is how often a vector is read and written. Sums
run in float64: the norm of 10^8 entries in float32 is off by one per cent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import Params

_LONG = 1 << 22  # entries of a flat vector for which compiled loops are worth importing: less stays in the caches
TINY = 1e-12  # a norm below this has no direction
_COMPILED = (torch.float32, torch.float64)
_PIECE = 1 << 15  # entries at a time otherwise


class Chord(NamedTuple):
    """How far apart u and w point.

    Attributes:
        length: || u/|u| - w/|w| ||_2; 0 where a norm has no direction.
        norm_u, norm_w, norm_difference: |u|, |w|, |u - w|.
    """

    length: float
    norm_u: float
    norm_w: float
    norm_difference: float


class Piece(NamedTuple):
    """What mixes into one tensor.

    Attributes:
        region: the leading slice of every dimension that takes part, as its length.
        tensor: of that shape.
    """

    region: tuple[int, ...]
    tensor: Tensor


def chord(u: Params, w: Params, names: Collection[str] | None = None) -> Chord:
    """|| u/|u| - w/|w| ||_2 over the floating-point entries, of these names if given: FedBaF, Algorithm 1, line 9.

    In one pass, by |x/|x| - y/|y||^2 = (|x - y|^2 - (|x| - |y|)^2) / (|x| |y|), which does not cancel where u is close
    to w. Not finite where an entry is not.

    Raises:
        KeyError: names differ, or one of ``names`` is not there.
        ValueError: shapes or dtypes differ.

    Example:
        >>> w = Params({"w": torch.tensor([5.0, 0.0])})
        >>> u = Params({"w": torch.tensor([3.0, 4.0])})
        >>> chord(u, w)
        Chord(length=0.894427190999916, norm_u=5.0, norm_w=5.0, norm_difference=4.47213595499958)
    """
    u.check_like(w.layout)
    parts: list[Any] = []
    for dtype, start, stop in _runs(u, names):
        long = len(u.flats[dtype]) >= _LONG and dtype in _COMPILED
        parts.append(_squares(u.flats[dtype][start:stop], w.flats[dtype][start:stop], long))
    a, b, c = (math.sqrt(math.fsum(column)) for column in np.concatenate(parts).T) if parts else (0.0, 0.0, 0.0)
    if a < TINY or b < TINY:
        return Chord(0.0, a, b, c)
    square = (c - abs(a - b)) * (c + abs(a - b)) / (a * b)
    return Chord(0.0 if square < 0 else math.sqrt(square), a, b, c)


def mix(u: Params, pieces: Mapping[str, Piece], a: float | Mapping[str, float | Tensor]) -> Params:
    """(u + a p) / (1 + a) where there is a piece, u elsewhere: FedBaF, Algorithm 1, line 11.

    Computed as u/(1 + a) + p a/(1 + a) in float64 and rounded to u's dtype. Where a is the number 0, and in what is
    not floating-point, u's bits.

    Args:
        pieces: name -> what it is mixed with.
        a: at least 0; one number, or one for each name: a number or a tensor of the piece's shape. Names without one
            keep u's bits.

    Raises:
        KeyError: u has no parameter of that name.
        ValueError: a region is not within its tensor, or p or a not of its shape, or a negative or not a number.

    Example:
        >>> u = Params({"w": torch.tensor([3.0, 4.0, 7.0])})
        >>> mix(u, {"w": Piece((2,), torch.tensor([-3.0, 6.0]))}, 1.0)["w"].tolist()
        [0.0, 5.0, 7.0]
    """
    if extra := [name for name in pieces if name not in u]:
        raise KeyError(f"no such parameters: {sorted(extra)[:6]}")
    flats = dict(u.flats)
    for dtype, flat in u.flats.items():
        if not dtype.is_floating_point:
            continue
        out, long = buffers.empty(len(flat), dtype), len(flat) >= _LONG and dtype in _COMPILED
        flats[dtype] = out
        for run in _mix_runs(u, dtype, pieces, a):
            o, x = out[run.start : run.stop], flat[run.start : run.stop]
            if run.p is None:
                o.copy_(x)
            else:
                _mix(o, x, run.p, run.a, long)
            for name in run.slices:
                _, start, stop, shape = u.layout.slots[name]
                region, p = pieces[name]
                o, x = (v[start:stop].view(shape)[tuple(map(slice, region))] for v in (out, flat))
                rows = max(1, _PIECE * region[0] // max(1, p.numel()))
                _mix_in_pieces(o, x, p.detach().cpu(), _a_of(name, region, a), rows)
    return Params.from_flat(u.layout, flats)


# --- the passes -------------------------------------------------------------------------------------------------------


def _squares(u: Tensor, w: Tensor, long: bool) -> Any:
    """(blocks, 3) float64: sum u^2, sum w^2, sum (u - w)^2 of each block."""
    if long:
        from fedfm.linalg.kernels import vector_loops

        sums = np.empty((-(-len(u) // vector_loops.BLOCK), 3))
        vector_loops.squares(u.numpy(), w.numpy(), sums)
        return sums
    found = []
    for x, y in zip(torch.split(u, _PIECE), torch.split(w, _PIECE), strict=True):
        x, y = x.double(), y.double()
        d = x - y
        found.append([float(torch.dot(v, v)) for v in (x, y, d)])
    return np.array(found).reshape(-1, 3)


def _mix(out: Tensor, u: Tensor, p: Tensor, a: float | Tensor, long: bool) -> None:
    if long and p.dtype == u.dtype and isinstance(a, float):
        from fedfm.linalg.kernels import vector_loops

        o = out.numpy()
        vector_loops.mix(o, u.numpy(), p.numpy(), 1 / (1 + a), a / (1 + a), np.empty(vector_loops.PIECE, o.dtype))
    else:
        _mix_in_pieces(out, u, p, a, _PIECE)


def _mix_in_pieces(out: Tensor, u: Tensor, p: Tensor, a: float | Tensor, rows: int) -> None:
    """So many rows of the first dimension at a time."""
    for i in range(0, len(out), rows):
        here = slice(i, i + rows)
        a_here = a[here].double() if isinstance(a, Tensor) else a
        own, other = 1 / (1 + a_here), a_here / (1 + a_here)
        out[here].copy_((u[here].double() * own).add_(p[here].double() * other))


# --- runs: stretches of a flat vector that one loop takes -------------------------------------------------------------


@dataclass
class _Run:
    """Entries start to stop of a flat vector, mixed with ``p`` by ``a``. Copied where ``p`` is None, and then mixed on
    slices of what ``slices`` names.
    """

    start: int
    stop: int
    p: Tensor | None = None
    a: float | Tensor = 0.0
    slices: list[str] = field(default_factory=list)

    def takes(self, after: _Run) -> bool:
        """Longer by what comes ``after``, if one loop can take both."""
        if (self.p is None) != (after.p is None):
            return False
        if self.p is not None and after.p is not None:
            if isinstance(self.a, Tensor) or isinstance(after.a, Tensor) or self.a != after.a:
                return False
            storage, end = self.p.untyped_storage(), self.p.storage_offset() + len(self.p)
            if (
                after.p.untyped_storage().data_ptr() != storage.data_ptr()
                or after.p.dtype != self.p.dtype
                or after.p.storage_offset() != end
            ):
                return False
            self.p = self.p.as_strided((after.stop - self.start,), (1,), self.p.storage_offset())
        self.stop = after.stop
        self.slices += after.slices
        return True


def _mix_runs(
    u: Params, dtype: torch.dtype, pieces: Mapping[str, Piece], a: float | Mapping[str, float | Tensor]
) -> list[_Run]:
    found: list[_Run] = []
    for name, (of, start, stop, shape) in u.layout.slots.items():
        if of != dtype:
            continue
        run = _Run(start, stop)
        if name in pieces:
            region, p = pieces[name]
            if len(region) != len(shape) or any(not 0 <= r <= n for r, n in zip(region, shape, strict=True)):
                raise ValueError(f"{name}: the region {tuple(region)} is not within {shape}")
            if tuple(p.shape) != tuple(region):
                raise ValueError(f"{name}: a piece of shape {tuple(p.shape)} for the region {tuple(region)}")
            a_of = _a_of(name, region, a)
            if isinstance(a_of, float) and a_of == 0:
                pass  # u's bits
            elif tuple(region) == shape:
                run.p = p.detach().cpu().contiguous().view(-1)
                run.a = a_of.reshape(-1) if isinstance(a_of, Tensor) else a_of
            else:
                run.slices.append(name)
        if not found or not found[-1].takes(run):
            found.append(run)
    return found


def _a_of(name: str, region: tuple[int, ...], a: float | Mapping[str, float | Tensor]) -> float | Tensor:
    value = a.get(name, 0.0) if isinstance(a, Mapping) else a
    if isinstance(value, Tensor) and value.dim() > 0:
        if tuple(value.shape) != tuple(region):
            raise ValueError(f"{name}: a has shape {tuple(value.shape)}, expected {tuple(region)}")
        least = float(value.min()) if value.numel() else 0.0
    else:
        value = least = float(value)
    if not least >= 0 or math.isinf(least):
        raise ValueError(f"{name}: a = {least}, expected a finite number of at least 0")
    return value


def _runs(u: Params, names: Collection[str] | None) -> Iterator[tuple[torch.dtype, int, int]]:
    """(dtype, start, stop) of the stretches that these names fill."""
    if names is not None:
        if extra := [name for name in names if name not in u]:
            raise KeyError(f"no such parameters: {sorted(extra)[:6]}")
        names = set(names)
    open_: dict[torch.dtype, tuple[int, int]] = {}
    for name, (dtype, start, stop, _) in u.layout.slots.items():
        if not dtype.is_floating_point or (names is not None and name not in names):
            continue
        before = open_.get(dtype)
        if before is not None and before[1] == start:
            open_[dtype] = before[0], stop
            continue
        if before is not None:
            yield dtype, *before
        open_[dtype] = start, stop
    for dtype, run in open_.items():
        yield dtype, *run
