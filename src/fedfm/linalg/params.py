"""Params: the named weights that clients and server exchange, with vector-space arithmetic.

A method writes ``tau = theta - theta_bar`` and ``w + eta * delta`` as in its paper.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fedfm.linalg import pages
from fedfm.linalg.kernels import buffers

_BLOCK = 1 << 16  # entries of one float64 sum: they fit into the cache, and norms of 10^8 entries are exact to 1e-15


class Layout:
    """Names, dtypes and shapes of a Params, in order. Two Params in one operation must have the same layout.

    Attributes:
        entries: (name, dtype, shape) in order.
        slots: name -> (dtype, start, stop, shape) in the flat vector of that dtype.
        sizes: dtype -> length of its flat vector.
    """

    __slots__ = ("__weakref__", "entries", "sizes", "slots")

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
    """The layout, but with ``dtype`` for its floating-point entries."""
    return layout_of(tuple((n, dtype if d.is_floating_point else d, shape) for n, d, shape in layout.entries))


@functools.lru_cache(maxsize=512)
def layout_of(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Layout:
    """The unique Layout object of these entries: equal layouts are identical."""
    return _alive.setdefault(entries, Layout(entries))


_alive: WeakValueDictionary[Any, Layout] = WeakValueDictionary()  # the layouts that layout_of made


def layout_sent(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> Layout:
    """The Layout of received entries. It is not put into :func:`layout_of`'s cache, which a sender could fill."""
    return _alive.get(entries) or Layout(entries)


class Params(Mapping[str, Tensor]):
    """Immutable mapping from parameter name to tensor: a vector of R^P in one flat buffer for each dtype.

    Two operands must have the same names, shapes and dtypes. A mismatch raises an error.

    Args:
        tensors: name -> tensor. Params holds detached copies on the CPU.

    Example:
        >>> w = Params({"head.bias": torch.tensor([1.0, 2.0])})
        >>> (w + 0.5 * w)["head.bias"].tolist()
        [1.5, 3.0]
    """

    __slots__ = ("__weakref__", "_flats", "_views", "layout")
    __array_ufunc__ = None  # a NumPy scalar times a Params then calls __rmul__

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
        """A Params that uses the flat vectors ``flats`` without a copy. The vectors must not change afterwards."""
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
        """The flat vectors by dtype; read-only."""
        return self._flats

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return self.layout.nbytes

    def map(self, fn: Callable[..., Tensor], *others: Params) -> Params:
        """Apply an elementwise ``fn`` to the floating-point entries of self (and others); keep self's other entries.

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
        """The same tensors in the dtypes of ``layout``, which must have the same names.

        Raises:
            KeyError: names differ.
        """
        if differ := layout.slots.keys() ^ self.layout.slots.keys():
            raise KeyError(f"parameter names differ: {sorted(differ)[:6]}")
        return self if layout is self.layout else Params({n: self[n].to(dtype) for n, dtype, _ in layout.entries})

    def check_like(self, other: Layout) -> None:
        """Check that names, their order, shapes and dtypes are the same as in a layout.

        Raises:
            KeyError: the names or their order differ.
            ValueError: shapes or dtypes differ.
        """
        if self.layout is other:
            return
        if differ := self.layout.slots.keys() ^ other.slots.keys():
            raise KeyError(f"parameter names differ: {sorted(differ)[:6]}")
        for (name, *own), (other_name, *expected) in zip(self.layout.entries, other.entries, strict=True):
            if name != other_name:
                raise KeyError(f"parameter names are in another order: {name} where the other has {other_name}")
            if own != expected:
                raise ValueError(f"{name}: {own[0]} {own[1]} against {expected[0]} {expected[1]}")

    def __add__(self, other: Params) -> Params:
        return self.map(lambda a, b: pages.apply_in_pieces(torch.add, a, b), other)

    def __sub__(self, other: Params) -> Params:
        return self.map(lambda a, b: pages.apply_in_pieces(torch.sub, a, b), other)

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
        """Cosine similarity; 0 if either is the zero vector."""
        scale = self.norm() * other.norm()
        return self.dot(other) / scale if scale else 0.0

    def is_finite(self) -> bool:
        """Whether no entry is NaN or infinite."""
        # A finite sum proves that all entries are finite, and a sum is fast. If the sum is not finite,
        # it may only have overflowed. Then each entry is checked.
        return all(
            math.isfinite(float(flat.sum())) or bool(torch.isfinite(flat).all())
            for dtype, flat in self._flats.items()
            if dtype.is_floating_point
        )

    def within(self, most: float) -> bool:
        """Whether no entry is NaN or infinite, and the L2 norm is at most ``most``, which must be below 1e19."""
        return sum(squared_norm(flat) for d, flat in self._flats.items() if d.is_floating_point) <= most * most

    def only(self, names: Iterable[str]) -> Params:
        """The sub-vector of these names, in this order."""
        return Params({name: self[name] for name in names})

    def replace(self, other: Mapping[str, Tensor]) -> Params:
        """A copy in which the tensors of ``other`` replace the tensors of the same names.

        Raises:
            KeyError: ``other`` has a name that self lacks.
        """
        if extra := [name for name in other if name not in self]:
            raise KeyError(f"no such parameters: {sorted(extra)[:6]}")
        return Params({name: other.get(name, tensor) for name, tensor in self.items()})

    @classmethod
    def join(cls, **parts: Params) -> Params:
        """One vector made of several, with prefixed names: ``Params.join(w=w, c=c)``; :meth:`part` is the inverse."""
        return cls({f"{prefix}/{name}": tensor for prefix, part in parts.items() for name, tensor in part.items()})

    def part(self, prefix: str) -> Params:
        """The vector that was joined under ``prefix``."""
        names = [name for name in self if name.startswith(f"{prefix}/")]
        return Params({name[len(prefix) + 1 :]: self[name] for name in names})

    def sha256(self) -> str:
        """Hash over name, dtype, shape and little-endian bytes of every tensor, in order of names."""
        return sha256_of({"": self})

    def state(self) -> dict[str, Tensor]:
        """A dict of copies, for ``load_state_dict`` and ``save_file``."""
        return {name: tensor.clone() for name, tensor in self.items()}


def squared_norm(flat: Tensor) -> float:
    """The squared L2 norm of a vector (P,), accurate to a few digits.

    It is not finite if an entry is NaN, infinite or larger than 1e19.
    """
    if flat.dtype in (torch.float32, torch.float64):
        return float(torch.dot(flat, flat))
    norm = float(torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32)))
    return norm * norm


def _dot(a: Tensor, b: Tensor) -> float:
    total = 0.0
    for x, y in zip(torch.split(a, _BLOCK), torch.split(b, _BLOCK), strict=True):
        x64 = x.double()
        total += float(torch.dot(x64, x64 if a is b else y.double()))
    return total


def sha256_of(models: Mapping[str, Params]) -> str:
    """One hash of several models, in order of their keys (client names; "" for a shared model)."""
    digest = hashlib.sha256()
    for key in sorted(models):
        params = models[key]
        for name in sorted(params):
            tensor = params[name].contiguous()
            dtype = str(tensor.dtype).removeprefix("torch.")
            digest.update(f"{key}\x1f{name}\x1f{dtype}\x1f{tuple(tensor.shape)}".encode())
            digest.update(to_bytes(tensor))
    return digest.hexdigest()


def to_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes of a contiguous CPU tensor, without a copy."""
    raw: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if np.little_endian:
        return memoryview(raw)
    width = tensor.element_size()
    return memoryview(raw.reshape(-1, width)[:, ::-1].tobytes())
