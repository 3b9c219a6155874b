"""LoRA of several clients on one frozen linear map: y = W x + b + s B_k A_k x for the rows of client k."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedfm.training.packed.linear import Linear, product


class FlatLayout:
    """The slice of each trained tensor in a client's flat vector.

    The layout differs from the model's Params in two ways. All A of one linear map are adjacent, so that one product
    uses them all. B is transposed, because products with r contiguous rows are three times as fast as with r columns.
    """

    def __init__(self) -> None:
        self.slots: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.turned: set[str] = set()  # names of the transposed tensors
        self.size = 0

    def add(self, name: str, shape: Sequence[int], *, turned: bool = False) -> None:
        """Append a tensor of this shape; with ``turned`` it is the transpose of the model's tensor."""
        stop = self.size + math.prod(shape)
        self.slots[name] = (self.size, stop, tuple(shape))
        self.size = stop
        if turned:
            self.turned.add(name)

    def join(self, name: str, parts: Sequence[str]) -> None:
        """Give adjacent tensors a common name, which stands for their stack along the first dimension."""
        slots = [self.slots[part] for part in parts]
        self.slots[name] = (slots[0][0], slots[-1][1], (sum(s[2][0] for s in slots), *slots[0][2][1:]))

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of ``vector`` (P,) by name, in this layout's shapes; for vectors (b, P), the views have b in front."""
        front = vector.shape[:-1]
        return {n: vector[..., start:stop].view(*front, *shape) for n, (start, stop, shape) in self.slots.items()}

    def places(self, names: Collection[str]) -> list[slice]:
        """The slices of these tensors in a client's vector."""
        return [slice(*self.slots[name][:2]) for name in names]

    def tensor(self, name: str, views: dict[str, Tensor]) -> Tensor:
        """The view with this name in the model's shape."""
        return views[name].t() if name in self.turned else views[name]


@dataclass(frozen=True)
class LoraSite:
    """One LoRA: B (stop - start, r) A (r, in) added to the outputs start:stop of a map.

    Attributes:
        a, b: names of the trained tensors.
        scale: s = alpha / r, times the factor by which the frozen map's outputs were scaled.
        frozen_a: A if it is not trained (FFA-LoRA).
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
    """One client's part of a packed batch: its rows start:stop, its trained tensors and their gradients."""

    start: int
    stop: int
    w: dict[str, Tensor]
    gradient: dict[str, Tensor]

    def outer(self, name: str, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Write the gradient of the matrix ``name`` (p, q): scale left^T right, with left (n, p) and right (n, q)."""
        out = self.gradient[name]
        if scale == 1.0:
            torch.mm(left.t(), right, out=out)
        else:
            torch.addmm(out, left.t(), right, beta=0, alpha=scale, out=out)

    def total(self, name: str, x: Tensor) -> None:
        """Write the gradient of the vector ``name`` (q,): the sum over the rows of x (n, q)."""
        torch.sum(x, 0, out=self.gradient[name])

    def mean_of(self, rows: int) -> int:
        """The number by which the gradient of the sum of the losses of ``rows`` rows is divided."""
        return rows


@dataclass(frozen=True)
class RowSegment(Segment):
    """Rows of one client, with a gradient for each row's loss: gradients have an additional first axis of b rows.

    Attributes:
        place: positions (b, T) of each row's tokens. A row shorter than T is padded with the position after all rows.
            None if all rows have the same length.
    """

    place: Tensor | None

    def outer(self, name: str, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        out = self.gradient[name]
        found = torch.bmm(self._by_row(left, len(out)).mT, self._by_row(right, len(out)))
        torch.mul(found, scale, out=out)

    def total(self, name: str, x: Tensor) -> None:
        out = self.gradient[name]
        torch.sum(self._by_row(x, len(out)), 1, out=out)

    def mean_of(self, rows: int) -> int:
        return 1

    def _by_row(self, x: Tensor, b: int) -> Tensor:
        """(n, q) -> (b, T, q), zeros where a row has no more tokens."""
        return x.reshape(b, -1, x.shape[1]) if self.place is None else F.pad(x, (0, 0, 0, 1))[self.place]


class Adapted:
    """A frozen linear map with LoRA on some of its outputs."""

    def __init__(self, base: Linear, sites: Sequence[LoraSite], name: str) -> None:
        self.base, self.sites, self.name = base, tuple(sites), name
        self.trains_a = bool(sites) and sites[0].frozen_a is None
        frozen = [site.frozen_a for site in sites if site.frozen_a is not None]
        self.frozen_a = torch.cat(frozen) if frozen else None  # (R, in)

    @property
    def a(self) -> str:
        """Name of the stacked A of this map (R, in), where R is the sum of the ranks."""
        return f"{self.name}/A"

    def declare(self, flat: FlatLayout) -> None:
        """Add the trained tensors to the layout."""
        if self.trains_a:
            for site in self.sites:
                flat.add(site.a, (site.rank, self.base.weight.shape[1]))
            flat.join(self.a, [site.a for site in self.sites])
        for site in self.sites:
            flat.add(site.b, (site.rank, site.stop - site.start), turned=True)

    def part(self, start: int, stop: int) -> Adapted:
        """The map to outputs start:stop; no site may cross the border."""
        sites = [
            replace(s, start=s.start - start, stop=s.stop - start)
            for s in self.sites
            if start <= s.start and s.stop <= stop
        ]
        return Adapted(self.base.rows(start, stop), sites, f"{self.name}[{start}:{stop}]")

    def forward(self, x: Tensor, segments: Sequence[Segment], *, low: bool = False) -> tuple[Tensor, list[Tensor]]:
        """(N, in) -> (N, out), and A_k x_k (n_k, R) of each client for the gradient of B.

        ``low``: if there are no sites, leave the output of a bfloat16 product in bfloat16.
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
        """dL/dy (N, out) -> dL/dx (N, in) with ``need_input``; the gradients of A and B go into the segments."""
        out = self.base.backward(gradient, low=low) if need_input else None
        for s, h in zip(segments, hidden, strict=False):  # hidden is empty without sites
            g = gradient[s.start : s.stop]
            parts, at = [], 0
            for site in self.sites:
                piece = g[:, site.start : site.stop]
                s.outer(site.b, h[:, at : at + site.rank], piece, site.scale)
                if self.trains_a or need_input:
                    parts.append(product(piece, s.w[site.b]).mul_(site.scale))  # (n, r)
                at += site.rank
            if not parts:
                continue
            back = torch.cat(parts, 1) if len(parts) > 1 else parts[0]  # (n, R)
            if self.trains_a:
                s.outer(self.a, back, x[s.start : s.stop])
            if out is not None:
                out[s.start : s.stop].addmm_(back, self._a(s))
        return out

    def _a(self, segment: Segment) -> Tensor:
        return segment.w[self.a] if self.frozen_a is None else self.frozen_a
