"""Params: the named weights that travel between parties, with vector-space arithmetic.

A method writes ``tau = theta - theta_bar`` and ``w + eta * delta`` as its paper does.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedfm import buffers

_BLOCK = 1 << 16  # entries summed at a time in float64: fits the cache, and keeps norms of 10^8 entries exact to 1e-15
_PIECE = 1 << 15  # entries that torch handles at a time where several operations follow: fits the cache, one thread
_LONG = 1 << 22  # entries of a vector for which compiled loops are worth importing: shorter ones stay in the caches
_TERMS = 3  # of a mean, that wait to be added in one pass


class Layout:
    """Names, dtypes and shapes of a Params, in order: what two operands must share.

    Attributes:
        entries: (name, dtype, shape) in order.
        slots: name -> (dtype, start, stop, shape) in the flat vector of that dtype.
        sizes: dtype -> length of its flat vector.
    """

    __slots__ = ("entries", "key", "sizes", "slots")

    def __init__(self, entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> None:
        self.entries = entries
        self.slots: dict[str, tuple[torch.dtype, int, int, tuple[int, ...]]] = {}
        self.sizes: dict[torch.dtype, int] = {}
        for name, dtype, shape in entries:
            start = self.sizes.get(dtype, 0)
            stop = start + math.prod(shape)
            self.slots[name] = (dtype, start, stop, shape)
            self.sizes[dtype] = stop
        if len(self.slots) != len(entries):
            raise ValueError("a name occurs twice")

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(size * dtype.itemsize for dtype, size in self.sizes.items())


def in_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    """The layout with its floating-point entries in another dtype."""
    return layout_of(tuple((n, dtype if d.is_floating_point else d, shape) for n, d, shape in layout.entries))


@functools.lru_cache(maxsize=512)
def layout_of(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Layout:
    """The one Layout object of these entries, so that equal layouts are identical."""
    return Layout(entries)


class Params(Mapping[str, Tensor]):
    """Immutable mapping from parameter name to tensor: a vector of R^P, kept in named pieces of one flat buffer a
    dtype.

    Two operands must have the same names, shapes and dtypes: a mismatch raises, it is never skipped.

    Args:
        tensors: name -> tensor; copied, detached, on the CPU.

    Example:
        >>> w = Params({"head.bias": torch.tensor([1.0, 2.0])})
        >>> (w + 0.5 * w)["head.bias"].tolist()
        [1.5, 3.0]
    """

    __slots__ = ("_flats", "_views", "layout")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parts: dict[torch.dtype, list[Tensor]] = {}
        entries = []
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            entries.append((name, tensor.dtype, tuple(tensor.shape)))
            parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1).cpu())
        self.layout = layout_of(tuple(entries))
        self._flats = {
            dtype: torch.cat(pieces, out=buffers.empty(sum(map(len, pieces)), dtype)) for dtype, pieces in parts.items()
        }
        self._views: dict[str, Tensor] = {}

    @classmethod
    def from_flat(cls, layout: Layout, flats: Mapping[torch.dtype, Tensor]) -> Params:
        """Without a copy: ``flats`` are the flat vectors by dtype, and must not change afterwards."""
        self = object.__new__(cls)
        for dtype, size in layout.sizes.items():
            if flats[dtype].shape != (size,) or flats[dtype].dtype != dtype:
                raise ValueError(f"flat vector of {dtype} has shape {tuple(flats[dtype].shape)}, expected ({size},)")
        self.layout, self._flats, self._views = layout, dict(flats), {}
        return self

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._views:
            dtype, start, stop, shape = self.layout.slots[name]
            self._views[name] = self._flats[dtype][start:stop].view(shape)
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.slots)

    def __len__(self) -> int:
        return len(self.layout.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.layout.slots

    def __repr__(self) -> str:
        return f"Params({len(self)} tensors, {sum(self.layout.sizes.values())} entries)"

    @property
    def flats(self) -> Mapping[torch.dtype, Tensor]:
        """The flat vectors by dtype; not to be written to."""
        return self._flats

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.layout.nbytes

    def map(self, fn: Callable[..., Tensor], *others: Params) -> Params:
        """Apply an elementwise ``fn`` to the floating-point entries of self (and others); the rest is self's.

        Raises:
            KeyError: names differ.
            ValueError: shapes or dtypes differ.
        """
        flats = dict(self._flats)
        for other in others:
            self.check_like(other.layout)
        for dtype, flat in self._flats.items():
            if dtype.is_floating_point:
                flats[dtype] = fn(flat, *[other._flats[dtype] for other in others])
        return Params.from_flat(self.layout, flats)

    def cast(self, layout: Layout) -> Params:
        """The same tensors in the dtypes of a layout with these names.

        Raises:
            KeyError: names differ.
        """
        if layout.slots.keys() != self.layout.slots.keys():
            raise KeyError(f"parameter names differ: {sorted(layout.slots.keys() ^ self.layout.slots.keys())[:6]}")
        return self if layout is self.layout else Params({n: self[n].to(dtype) for n, dtype, _ in layout.entries})

    def check_like(self, other: Layout) -> None:
        """This is of that layout: names in order, shapes and dtypes.

        Raises:
            KeyError: names differ, or their order.
            ValueError: shapes or dtypes differ.
        """
        if self.layout is other:
            return
        if self.layout.slots.keys() != other.slots.keys():
            raise KeyError(f"parameter names differ: {sorted(self.layout.slots.keys() ^ other.slots.keys())[:6]}")
        for (name, dtype, shape), (other_name, other_dtype, other_shape) in zip(
            self.layout.entries, other.entries, strict=True
        ):
            if name != other_name:
                raise KeyError(f"parameter names are in another order: {name} where the other has {other_name}")
            if (dtype, shape) != (other_dtype, other_shape):
                raise ValueError(f"{name}: {dtype} {shape} against {other_dtype} {other_shape}")

    def __add__(self, other: Params) -> Params:
        if isinstance(other, _Ratio) and (total := other.added_to(self)):
            return total
        return self.map(lambda a, b: torch.add(a, b, out=buffers.like(a)), other)

    def __sub__(self, other: Params) -> Params:
        return self.map(lambda a, b: torch.sub(a, b, out=buffers.like(a)), other)

    def __mul__(self, scalar: float) -> Params:
        return self.map(lambda t: torch.mul(t, scalar, out=buffers.like(t)))

    __rmul__ = __mul__

    def __truediv__(self, scalar: float) -> Params:
        return self.map(lambda t: torch.div(t, scalar, out=buffers.like(t)))

    def __neg__(self) -> Params:
        return self.map(lambda t: torch.neg(t, out=buffers.like(t)))

    def dot(self, other: Params) -> float:
        """Inner product <self, other> over the floating-point entries, accumulated in float64."""
        self.check_like(other.layout)
        return sum(_dot(flat, other._flats[d]) for d, flat in self._flats.items() if d.is_floating_point)

    def norm(self) -> float:
        """L2 norm over all floating-point entries together."""
        return math.sqrt(self.dot(self))

    def cosine(self, other: Params) -> float:
        """Cosine similarity; 0 when either is the zero vector."""
        scale = self.norm() * other.norm()
        return self.dot(other) / scale if scale else 0.0

    def is_finite(self) -> bool:
        """No entry is NaN or infinite."""
        # A sum meets every entry once and stays finite unless an entry is not, or it overflows: only then look closely.
        return all(
            math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())
            for dtype, flat in self._flats.items()
            if dtype.is_floating_point
        )

    def only(self, names: Iterable[str]) -> Params:
        """The sub-vector with these names, in this order."""
        return Params({name: self[name] for name in names})

    def replace(self, other: Mapping[str, Tensor]) -> Params:
        """A copy in which ``other``'s tensors take the place of the like-named ones.

        Raises:
            KeyError: ``other`` has a name that self lacks.
        """
        if extra := [name for name in other if name not in self]:
            raise KeyError(f"no such parameters: {sorted(extra)[:6]}")
        return Params({name: other.get(name, tensor) for name, tensor in self.items()})

    def by_layer(self) -> dict[str, Params]:
        """Split by layer: the name up to its last dot."""
        groups: dict[str, list[str]] = {}
        for name in self:
            groups.setdefault(name.rpartition(".")[0], []).append(name)
        return {layer: self.only(names) for layer, names in groups.items()}

    @classmethod
    def join(cls, **parts: Params) -> Params:
        """One vector of several, names prefixed: ``Params.join(w=w, c=c)``; :meth:`part` takes it apart again."""
        return cls({f"{prefix}/{name}": tensor for prefix, part in parts.items() for name, tensor in part.items()})

    def part(self, prefix: str) -> Params:
        """The vector that was joined under ``prefix``."""
        names = [name for name in self if name.startswith(f"{prefix}/")]
        return Params({name[len(prefix) + 1 :]: self[name] for name in names})

    def sha256(self) -> str:
        """Hash over name, dtype, shape and little-endian bytes of every tensor, in order of names."""
        return sha256_of({"": self})

    def state(self) -> dict[str, Tensor]:
        """A plain dict of copies, as ``load_state_dict`` and ``save_file`` take it."""
        return {name: tensor.clone() for name, tensor in self.items()}


def _dot(a: Tensor, b: Tensor) -> float:
    if len(a) >= _LONG and a.dtype in (torch.float32, torch.float64):
        from fedfm import passes

        sums = np.empty((-(-len(a) // passes.BLOCK), 1))
        passes.products(a.numpy(), b.numpy(), sums)
        return math.fsum(sums[:, 0])
    total = 0.0
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        x64 = x.double()
        total += float(torch.dot(x64, x64 if a is b else y.double()))
    return total


def sha256_of(models: Mapping[str, Params]) -> str:
    """One hash of several models, in order of their keys (client names; "" for one model for all)."""
    digest = hashlib.sha256()
    for key in sorted(models):
        params = models[key]
        for name in sorted(params):
            tensor = params[name].contiguous()
            digest.update(
                f"{key}\x1f{name}\x1f{str(tensor.dtype).removeprefix('torch.')}\x1f{tuple(tensor.shape)}".encode()
            )
            digest.update(to_bytes(tensor))
    return digest.hexdigest()


def to_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes of a contiguous CPU tensor, without a copy."""
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if np.little_endian:
        return memoryview(raw)
    width = tensor.element_size()
    return memoryview(raw.reshape(-1, width)[:, ::-1].tobytes())


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
    if len(out) >= _LONG and _fuses(out.dtype):
        done = len(out) - len(out) % 64  # what torch's vector lanes take; it rounds the rest in another way
        _fold_compiled(
            out[:done],
            None if start is None else start[:done],
            [(a, x[:done]) for a, x in terms],
            by,
            None if base is None else base[:done],
        )
    for at in range(done, len(out), _PIECE):
        here = slice(at, at + _PIECE)
        o, todo = out[here], [(a, x[here]) for a, x in terms]
        if start is None:
            a, x = todo.pop(0)
            torch.mul(x, a, out=o)
        elif start is not out:
            o.copy_(start[here])
        for a, x in todo:
            o.add_(x, alpha=a)
        if by is not None:
            o.div_(by)
        if base is not None:
            torch.add(base[here], o, out=o)
    return out


def _fold_compiled(
    out: Tensor,
    start: Tensor | None,
    terms: list[tuple[float, Tensor]],
    by: float | None = None,
    base: Tensor | None = None,
) -> None:
    """The same in one pass, on a multiple of 64 entries."""
    from fedfm import passes

    o = out.numpy()
    number = o.dtype.type
    begun = () if start is None else (0,) if start.data_ptr() == out.data_ptr() else (0, 0)
    first = o if start is None else start.numpy()
    x, y, z = (terms * _TERMS)[:_TERMS]
    ends = ((), number(1)) if by is None else ((0,), number(by))
    added = ((), o) if base is None else ((0,), base.numpy())
    flat = (number(x[0]), x[1].numpy()), (number(y[0]), y[1].numpy()), (number(z[0]), z[1].numpy())
    passes.fold(o, begun, first, (0,) * len(terms), *(part for a, x in flat for part in (x, a)), *ends, *added)


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
