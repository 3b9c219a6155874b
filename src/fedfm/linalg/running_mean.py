"""Weighted means of parameter vectors: one running sum and the last few terms, in few passes over memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fedfm.linalg.kernels import buffers
from fedfm.linalg.params import LONG, Layout, Params

_PIECE = 1 << 15  # entries that torch handles at a time where several operations follow: fits the cache, one thread
_TERMS = 3  # of a mean, that wait to be added in one pass


class Mean:
    """Streaming weighted mean (sum_k a_k x_k) / (sum_k a_k): one running sum and the last few terms in memory, whatever
    their number.

    Attributes:
        weight: sum_k a_k so far.
        count: number of terms so far.
    """

    def __init__(self) -> None:
        self.weight, self.count = 0.0, 0
        self._pending: list[tuple[float, Params]] = []  # a pass over the sum adds several
        self._layout: Layout | None = None
        self._sums: dict[torch.dtype, Tensor] = {}
        self._rest: dict[torch.dtype, Tensor] = {}
        self._result: Params | None = None

    def add(self, weight: float, x: Params) -> None:
        """Fold one term in; float32 entries are summed in float32, in the order of the calls.

        Raises:
            RuntimeError: the mean was already made.
        """
        if self._result is not None:
            raise RuntimeError("a term comes after the mean was made")
        if self._layout is None:
            self._layout = x.layout
            self._rest = {d: f for d, f in x.flats.items() if not d.is_floating_point}
        else:
            x.check_like(self._layout)
        if len(self._pending) == _TERMS:
            self._fold()
        self._pending.append((weight, x))
        self.weight += weight
        self.count += 1

    def _fold(self) -> None:
        for dtype, size in _floating(self._layout):
            total = self._sums.get(dtype)
            out = buffers.empty(size, dtype) if total is None else total
            self._sums[dtype] = _folded(out, total, [(a, x.flats[dtype]) for a, x in self._pending])
        self._pending = []

    def result(self) -> Params:
        """The mean; it ends the sum.

        Raises:
            ValueError: no term of positive weight was added.
        """
        if self._layout is None or not self.weight > 0:
            raise ValueError("a weighted mean needs at least one term of positive weight")
        if self._result is None:
            self._result = _Ratio(self._layout, self._sums, self._pending, self.weight, self._rest)
            self._sums, self._pending = {}, []
        return self._result


class _Ratio(Params):
    """What a Mean found, divided where it is first used, so that ``w + mean`` takes one pass."""

    __slots__ = ("_pending", "_rest", "_sums", "_weight")

    def __init__(
        self,
        layout: Layout,
        sums: dict[torch.dtype, Tensor],
        pending: list[tuple[float, Params]],
        weight: float,
        rest: dict[torch.dtype, Tensor],
    ) -> None:
        self.layout, self._views = layout, {}
        self._sums, self._pending, self._weight, self._rest = sums, pending, weight, rest

    def __getattr__(self, name: str) -> Any:
        if name != "_flats":  # which nothing has set: the entries are asked for
            raise AttributeError(name)
        flats = dict(self._rest)
        for dtype, size in _floating(self.layout):
            total = self._sums.get(dtype)
            out = buffers.empty(size, dtype) if total is None else total
            flats[dtype] = _folded(out, total, self._terms(dtype), self._weight)
        self._flats = flats
        self._sums, self._pending = {}, []
        return flats

    def added_to(self, base: Params) -> Params | None:
        """``base`` plus the mean, and the mean stays unmade; None where it is made."""
        if not self._pending:
            return None
        base.check_like(self.layout)
        flats = dict(base.flats)
        for dtype, size in _floating(self.layout):
            out, total = buffers.empty(size, dtype), self._sums.get(dtype)
            flats[dtype] = _folded(out, total, self._terms(dtype), self._weight, base.flats[dtype])
        return Params.from_flat(self.layout, flats)

    def _terms(self, dtype: torch.dtype) -> list[tuple[float, Tensor]]:
        return [(a, x.flats[dtype]) for a, x in self._pending]


def _floating(layout: Layout | None) -> list[tuple[torch.dtype, int]]:
    return [(d, size) for d, size in layout.sizes.items() if d.is_floating_point] if layout else []


def _folded(
    out: Tensor,
    start: Tensor | None,
    terms: list[tuple[float, Tensor]],
    by: float | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """``out`` = base + (start + sum_k a_k x_k) / by, what of it there is, from at most _TERMS terms and at least one.

    Multiplied, added and divided entry by entry as torch's ``*``, ``add_``, ``/`` and ``+`` on the whole vectors would
    on one thread, in the same order and the same roundings.
    """
    done = 0
    if len(out) >= LONG and _fuses(out.dtype):
        done = len(out) - len(out) % 64  # what torch's vector lanes take; it rounds the rest in another way
        _fold_compiled(
            out[:done],
            None if start is None else start[:done],
            [(a, x[:done]) for a, x in terms],
            by,
            None if base is None else base[:done],
        )
    if not done and len(out) <= _PIECE:
        _fold_piece(out, None if start is out else start, start is None, terms, by, base)
    else:
        for at in range(done, len(out), _PIECE):
            here = slice(at, at + _PIECE)
            begun = None if start is None or start is out else start[here]
            of = [(a, x[here]) for a, x in terms]
            _fold_piece(out[here], begun, start is None, of, by, None if base is None else base[here])
    return out


def _fold_piece(
    out: Tensor,
    start: Tensor | None,
    afresh: bool,
    terms: list[tuple[float, Tensor]],
    by: float | None,
    base: Tensor | None,
) -> None:
    """The same of few entries; without a start ``out`` is it, unless the sum begins ``afresh``."""
    if afresh:
        torch.mul(terms[0][1], terms[0][0], out=out)
        terms = terms[1:]
    elif start is not None:
        out.copy_(start)
    for a, x in terms:
        out.add_(x, alpha=a)
    if by is not None:
        out.div_(by)
    if base is not None:
        torch.add(base, out, out=out)


def _fold_compiled(
    out: Tensor,
    start: Tensor | None,
    terms: list[tuple[float, Tensor]],
    by: float | None = None,
    base: Tensor | None = None,
) -> None:
    """The same in one pass, on a multiple of 64 entries."""
    from fedfm.linalg.kernels import vector_loops

    o = out.numpy()
    number = o.dtype.type
    begun = () if start is None else (0,) if start.data_ptr() == out.data_ptr() else (0, 0)
    first = o if start is None else start.numpy()
    x, y, z = (terms * _TERMS)[:_TERMS]
    ends = ((), number(1)) if by is None else ((0,), number(by))
    added = ((), o) if base is None else ((0,), base.numpy())
    flat = (number(x[0]), x[1].numpy()), (number(y[0]), y[1].numpy()), (number(z[0]), z[1].numpy())
    vector_loops.fold(o, begun, first, (0,) * len(terms), *(part for a, x in flat for part in (x, a)), *ends, *added)


@functools.cache
def _fuses(dtype: torch.dtype) -> bool:
    """Torch rounds x + a y once in its vector lanes, as the compiled loop does."""
    if dtype not in (torch.float32, torch.float64):
        return False
    draw = torch.Generator().manual_seed(0)
    x, y, z, w = (torch.randn(4096, dtype=dtype, generator=draw) for _ in range(4))
    out = torch.empty_like(x)
    _fold_compiled(out, None, [(3.7, x), (0.3, y), (1.9, z)], 5.9, w)
    return torch.equal(out, w + (x * 3.7).add_(y, alpha=0.3).add_(z, alpha=1.9) / 5.9)


def weighted_mean(terms: Iterable[tuple[float, Params]]) -> Params:
    """(sum_k a_k x_k) / (sum_k a_k), streaming."""
    mean = Mean()
    for weight, x in terms:
        mean.add(weight, x)
    return mean.result()
