"""Loops over whole vectors that meet each number once, compiled. Imported where a vector is too long for the caches.

What rounds is written out: :func:`fold` multiplies and adds in one rounding where torch does, and :func:`mix` never
does. Only :func:`products` and :func:`squares` sum in vector lanes, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from fedfm.linalg.kernels.jit import EXACT, compiled, part
from fedfm.linalg.kernels.simd import LINE, fetch, move, sent

BLOCK = 1 << 13  # entries summed before the sum is put aside
PIECE = 1 << 11  # entries of a mixture made at a time, in the first cache, before they leave
AHEAD = 64  # cache lines asked for before they are read
as_written = partial(compiled, maths=set())
in_lanes = partial(compiled, maths=EXACT)


@intrinsic  # type: ignore[untyped-decorator]
def _fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A b + c, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


@intrinsic  # type: ignore[untyped-decorator]
def _stream(typing: Any, out: Any, x: Any, lines: Any) -> Any:
    """Write so many cache lines of ``x`` to the like vector ``out``, which begins at one, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        line, word = ir.VectorType(ir.FloatType(), LINE // 4), ir.IntType(64)
        to, from_ = (
            builder.bitcast(context.make_array(kind)(context, builder, value).data, line.as_pointer())
            for kind, value in zip(signature.args[:2], values[:2], strict=True)
        )
        before, loop, after = builder.block, builder.append_basic_block("line"), builder.append_basic_block("sent")
        builder.cbranch(builder.icmp_signed(">", values[2], word(0)), loop, after)
        builder.position_at_end(loop)
        i = builder.phi(word)
        sent = builder.store(builder.load(builder.gep(from_, [i]), align=4), builder.gep(to, [i]), align=LINE)
        sent.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        following = builder.add(i, word(1))
        i.add_incoming(word(0), before)
        i.add_incoming(following, loop)
        builder.cbranch(builder.icmp_signed("<", following, values[2]), loop, after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return types.void(out, x, types.int64), generate


@partial(part, maths=set())
def _leave(out: Any, made: Any) -> None:
    """Write ``made`` to ``out``, as long as it: in lines past the caches, if it begins at one."""
    done = 0
    if out.ctypes.data % LINE == 0:
        done = len(out) * out.itemsize // LINE
        _stream(out, made, done)
        done = done * LINE // out.itemsize
    for i in range(done, len(out)):
        out[i] = made[i]


@as_written
def beside(out: Any, addresses: Any) -> None:
    """Row i of ``out`` (K, 16 n) is the float32 numbers in memory from address i on.

    Pieces of K vectors lie far apart, and what the machine fetches by itself ends with each: the next one's begin is
    asked for here.
    """
    count, lines = out.shape[0], out.shape[1] // 16
    for i in range(count):
        here, following = addresses[i], addresses[min(i + 1, count - 1)]
        row = out[i]
        for j in range(lines):
            fetch(here + LINE * (j + AHEAD) if j + AHEAD < lines else following + LINE * (j + AHEAD - lines))
            move(row, 16 * j, here + LINE * j)


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
def mix(out: Any, u: Any, p: Any, own: float, other: float, room: Any) -> None:
    """Out = own u + other p, in float64, rounded once more at the end; ``room`` is for ``PIECE`` entries.

    It leaves in whole lines past the caches, since a plain store would read each of them first. (To :func:`fold`, which
    reads more, this makes no difference.)
    """
    for at in range(0, len(out), PIECE):
        o, us, ps = out[at : at + PIECE], u[at : at + PIECE], p[at : at + PIECE]
        made = room[: len(o)]
        for i in range(len(o)):
            made[i] = np.float64(us[i]) * own + np.float64(ps[i]) * other
        _leave(o, made)
    sent()


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
