"""Loops over whole vectors that meet each number once, compiled. Imported where a vector is too long for the caches.

What rounds is written out: :func:`fold` multiplies and adds in one rounding where torch does, and :func:`mix` never
does. Only :func:`products` and :func:`squares` sum in vector lanes, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numba.extending import intrinsic

from fedfm.compiled import compiled

BLOCK = 1 << 13  # entries summed before the sum is put aside
as_written = partial(compiled, maths=set())
in_lanes = partial(compiled, maths={"reassoc", "contract", "nsz", "arcp"})  # NaN and infinity keep their meaning


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


@as_written
def fold(
    out: Any, begun: Any, start: Any, count: Any, x: Any, a: Any, y: Any, b: Any, z: Any, c: Any, divide: Any, by: Any,
    add: Any, base: Any,
) -> None:  # fmt: skip
    """Out = start + a x + b y + c z, then over ``by``, then added to ``base``: what of it there is, tuples say.

    A tuple's length is known when the loop is compiled, and what is not there leaves no test in it. ``begun`` is empty
    without a start, of length one where ``out`` is the start, two where ``start`` is; ``count`` is as long as there are
    terms, of at least one; ``divide`` and ``add`` are empty for no.
    """
    for i in range(len(out)):
        if len(begun) == 0:
            t = a * x[i]
        elif len(begun) == 1:
            t = _fma(x[i], a, out[i])
        else:
            t = _fma(x[i], a, start[i])
        if len(count) > 1:
            t = _fma(y[i], b, t)
        if len(count) > 2:
            t = _fma(z[i], c, t)
        if len(divide) > 0:
            t = t / by
        if len(add) > 0:
            t = base[i] + t
        out[i] = t


@as_written
def mix(out: Any, u: Any, p: Any, own: float, other: float) -> None:
    """Out = own u + other p, in float64, rounded once more at the end."""
    for i in range(len(out)):
        out[i] = np.float64(u[i]) * own + np.float64(p[i]) * other


@in_lanes
def squares(u: Any, w: Any, sums: Any) -> None:
    """Sums (blocks, 3): sum u^2, sum w^2 and sum (u - w)^2 of each block."""
    for k in range(len(sums)):
        us, ws = u[k * BLOCK : (k + 1) * BLOCK], w[k * BLOCK : (k + 1) * BLOCK]
        a, b, c = 0.0, 0.0, 0.0
        for i in range(len(us)):
            x, y = np.float64(us[i]), np.float64(ws[i])
            d = x - y
            a += x * x
            b += y * y
            c += d * d
        sums[k, 0], sums[k, 1], sums[k, 2] = a, b, c


@in_lanes
def products(u: Any, w: Any, sums: Any) -> None:
    """Sums (blocks, 1): sum u w of each block."""
    for k in range(len(sums)):
        us, ws = u[k * BLOCK : (k + 1) * BLOCK], w[k * BLOCK : (k + 1) * BLOCK]
        a = 0.0
        for i in range(len(us)):
            a += np.float64(us[i]) * np.float64(ws[i])
        sums[k, 0] = a
