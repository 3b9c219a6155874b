"""LoRA on a frozen linear map, for several clients at once: y = W x + b + s B_k A_k x for the rows of client k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedfm.training.packed.linear import Linear, product


class FlatLayout:
    """Where each trained tensor lies in a client's flat vector; ``views`` cuts a vector (or its gradient) up.

    The order is ours, not that of the model's Params: the A of one linear map lie side by side, so that one product
    serves them all, and B lies transposed: products with r contiguous rows are three times as fast as with r columns.
    """

    def __init__(self) -> None:
        self.slots: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.turned: set[str] = set()  # names of tensors that lie transposed
        self.size = 0

    def add(self, name: str, shape: Sequence[int], *, turned: bool = False) -> None:
        """Append a tensor of this shape; ``turned`` says that the model's tensor is its transpose."""
        stop = self.size + math.prod(shape)
        self.slots[name] = (self.size, stop, tuple(shape))
        self.size = stop
        if turned:
            self.turned.add(name)

    def join(self, name: str, parts: Sequence[str]) -> None:
        """A name for neighbours that are stacked along their first dimension."""
        slots = [self.slots[part] for part in parts]
        self.slots[name] = (slots[0][0], slots[-1][1], (sum(s[2][0] for s in slots), *slots[0][2][1:]))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The pieces of ``vector`` (P,) by name, as they lie."""
        return {name: vector[start:stop].view(shape) for name, (start, stop, shape) in self.slots.items()}

    def tensor(self, name: str, views: dict[str, Tensor]) -> Tensor:
        """The piece with this name in the model's own shape."""
        return views[name].t() if name in self.turned else views[name]


@dataclass(frozen=True)
class LoraSite:
    """One LoRA: B (stop - start, r) A (r, in) added to the outputs start:stop of a map.

    Attributes:
        a, b: names of the trained tensors; ``frozen_a`` holds A where it is not trained (FFA-LoRA).
        scale: s = alpha / r, times whatever the frozen map's outputs were scaled by.
    """

    start: int
    stop: int
    rank: int
    scale: float
    a: str
    b: str
    frozen_a: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """The rows start:stop of the packed batch are one client's: its trained tensors, and where their gradients go."""

    start: int
    stop: int
    w: dict[str, Tensor]
    gradient: dict[str, Tensor]


class Adapted:
    """A frozen linear map with LoRA on some of its outputs."""

    def __init__(self, base: Linear, sites: Sequence[LoraSite], name: str) -> None:
        self.base, self.sites, self.name = base, tuple(sites), name
        self.trains_a = bool(sites) and sites[0].frozen_a is None
        frozen = [site.frozen_a for site in sites if site.frozen_a is not None]
        self.frozen_a = torch.cat(frozen) if frozen else None  # (R, in)

    @property
    def a(self) -> str:
        """Name of all A of this map stacked (R, in), R the sum of the ranks."""
        return f"{self.name}/A"

    def declare(self, flat: FlatLayout) -> None:
        """Give the trained tensors their places."""
        if self.trains_a:
            for site in self.sites:
                flat.add(site.a, (site.rank, self.base.weight.shape[1]))
            flat.join(self.a, [site.a for site in self.sites])
        for site in self.sites:
            flat.add(site.b, (site.rank, site.stop - site.start), turned=True)

    def part(self, start: int, stop: int) -> Adapted:
        """The map to outputs start:stop only; no site may straddle the border."""
        sites = [
            LoraSite(s.start - start, s.stop - start, s.rank, s.scale, s.a, s.b, s.frozen_a)
            for s in self.sites
            if start <= s.start and s.stop <= stop
        ]
        return Adapted(self.base.rows(start, stop), sites, f"{self.name}[{start}:{stop}]")

    def forward(self, x: Tensor, segments: Sequence[Segment], *, low: bool = False) -> tuple[Tensor, list[Tensor]]:
        """(N, in) -> (N, out), and A_k x_k (n_k, R) of each client for the gradient of B.

        ``low``: without sites, out is bfloat16 where that is what was multiplied in.
        """
        y = self.base.forward(x, low=low)
        if not self.sites:
            return y, []
        hidden = []
        for s in segments:
            h = product(x[s.start : s.stop], self._a(s))  # (n, R)
            at = 0
            for site in self.sites:
                out = y[s.start : s.stop, site.start : site.stop]
                out.addmm_(h[:, at : at + site.rank], s.w[site.b], alpha=site.scale)
                at += site.rank
            hidden.append(h)
        return y, hidden

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        hidden: list[Tensor],
        segments: Sequence[Segment],
        *,
        need_input: bool,
        low: bool = False,
    ) -> Tensor | None:
        """From dL/dy (N, out): the gradients of A and B into the segments, and dL/dx (N, in) if asked for."""
        out = self.base.backward(gradient, low=low) if need_input else None
        for s, h in zip(segments, hidden, strict=False):  # hidden is empty where there are no sites
            g = gradient[s.start : s.stop]
            parts, at = [], 0
            for site in self.sites:
                piece, b = g[:, site.start : site.stop], s.gradient[site.b]
                torch.addmm(b, h[:, at : at + site.rank].t(), piece, beta=0, alpha=site.scale, out=b)
                if self.trains_a or need_input:
                    parts.append(product(piece, s.w[site.b]).mul_(site.scale))  # (n, r)
                at += site.rank
            if not parts:
                continue
            back = torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # (n, R)
            if self.trains_a:
                torch.mm(back.t(), x[s.start : s.stop], out=s.gradient[self.a])
            if out is not None:
                out[s.start : s.stop].addmm_(back, self._a(s))
        return out

    def _a(self, segment: Segment) -> Tensor:
        return segment.w[self.a] if self.frozen_a is None else self.frozen_a
