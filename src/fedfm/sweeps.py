"""Passes over whole parameter vectors: how far two directions are apart, and a mixture with a third vector."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from torch import Tensor

from fedfm.params import Params

TINY = 1e-12  # a norm below this has no direction


class Chord(NamedTuple):
    """How far apart u and w point.

    Attributes:
        length: || u/|u| - w/|w| ||_2; 0 where a norm has no direction.
        norm_u, norm_w: |u|, |w|.
    """

    length: float
    norm_u: float
    norm_w: float


class Piece(NamedTuple):
    """What mixes into one tensor.

    Attributes:
        region: the leading slice of every dimension that takes part, as its length.
        tensor: of that shape.
    """

    region: tuple[int, ...]
    tensor: Tensor


def chord(u: Params, w: Params, names: Collection[str] | None = None) -> Chord:
    """The chord between the directions of u and w over the floating-point entries (of these names).

    In the form (|u-w|^2 - (|u|-|w|)^2) / (|u| |w|), which does not cancel where u and w are close.
    """
    some = list(u) if names is None else [n for n in u if n in names]
    some = [n for n in some if u[n].is_floating_point()]
    uu = math.fsum(_square(u[n]) for n in some)
    ww = math.fsum(_square(w[n]) for n in some)
    dd = math.fsum(_square(u[n].double() - w[n].double()) for n in some)
    norm_u, norm_w = math.sqrt(uu), math.sqrt(ww)
    if norm_u < TINY or norm_w < TINY:
        return Chord(0.0, norm_u, norm_w)
    return Chord(math.sqrt(max(dd - (norm_u - norm_w) ** 2, 0.0) / (norm_u * norm_w)), norm_u, norm_w)


def mix(u: Params, pieces: Mapping[str, Piece], a: float | Mapping[str, float | Tensor]) -> Params:
    """(u + a p) / (1 + a) on the regions of the pieces, u elsewhere.

    Args:
        a: one number, or one for each name: a number or a tensor of the piece's shape. Names without one stay.
    """
    flats = {dtype: flat.clone() for dtype, flat in u.flats.items()}
    out = Params.from_flat(u.layout, flats)
    for name, (region, p) in pieces.items():
        share = a.get(name, 0.0) if isinstance(a, Mapping) else a
        if isinstance(share, float) and not share:
            continue
        part = out[name][tuple(slice(length) for length in region)]
        part.copy_((part + share * p.to(part.dtype)) / (1 + share))
    return out


def _square(x: Tensor) -> float:
    x = x.reshape(-1).double()
    return float(x.dot(x))
