"""Sixteen float32 numbers as one value in compiled loops, for loops that the compiler does not vectorise.

LLVM does not vectorise some loops over a few dozen numbers or with many accumulators. For others the set-up of the
vector code takes longer than the loop. A value of ``Lanes`` takes one register of 512 bits, two of 256 or four of 128.
Offsets are counted in entries, not in bytes, and are not checked. A product and a sum may be contracted: computed as
one operation that rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic as _intrinsic
from numba.extending import models, register_model

from fedfm.linalg.kernels.jit import EXACT, part

COUNT = 16

WORD, _FLOAT, _INT = ir.IntType(64), ir.FloatType(), ir.IntType(32)
VECTOR, _WHOLE = ir.VectorType(_FLOAT, COUNT), ir.VectorType(_INT, COUNT)
CONTRACT = ("contract",)

F = np.float32
intrinsic: Callable[[Callable[..., Any]], Any] = _intrinsic


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


LANES = _Lanes()


class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, VECTOR)


register_model(_Lanes)(_Model)


def pointer(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """The address of entry ``at`` of an array of this kind."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def splat(builder: Any, x: Any) -> Any:
    """The number ``x`` in all lanes."""
    return _shuffle(builder, builder.insert_element(ir.Constant(VECTOR, ir.Undefined), x, WORD(0)), [0] * COUNT)


def _shuffle(builder: Any, a: Any, lanes: list[int], b: Any = None) -> Any:
    return builder.shuffle_vector(a, a if b is None else b, ir.Constant(_WHOLE, lanes))


@intrinsic
def load(typing: Any, x: Any, at: Any) -> Any:
    """The sixteen entries ``at``, ``at`` + 1, ... of the vector ``x``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        there = pointer(context, builder, signature.args[0], *values)
        return builder.load(builder.bitcast(there, VECTOR.as_pointer()), align=4)

    return LANES(x, types.int64), generate


@intrinsic
def store(typing: Any, x: Any, at: Any, v: Any) -> Any:
    """Write ``v`` to the sixteen entries ``at``, ``at`` + 1, ... of the vector ``x``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        there = pointer(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], builder.bitcast(there, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, LANES), generate


def _code(signature: Any, emit: Callable[..., Any]) -> Any:
    """An intrinsic's signature and code; ``emit`` takes the builder and the values."""
    return signature, lambda context, builder, _, values: emit(builder, *values)


def _max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), b, a)


@intrinsic
def all_of(typing: Any, x: Any) -> Any:
    """The number ``x`` in all lanes."""
    return _code(LANES(types.float32), splat)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """In each lane: a b + c."""

    def emit(builder: Any, a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=CONTRACT), c, flags=CONTRACT)

    return _code(LANES(LANES, LANES, LANES), emit)


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """In each lane: a b."""
    return _code(LANES(LANES, LANES), lambda builder, a, b: builder.fmul(a, b, flags=CONTRACT))


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """In each lane: a - b."""
    return _code(LANES(LANES, LANES), lambda builder, a, b: builder.fsub(a, b, flags=CONTRACT))


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """In each lane: max(a, b), or a if one of them is NaN."""
    return _code(LANES(LANES, LANES), _max)


@intrinsic
def first(typing: Any, v: Any, n: Any, rest: Any) -> Any:
    """The first n lanes of ``v``, and the number ``rest`` in the others."""

    def emit(builder: Any, v: Any, n: Any, rest: Any) -> Any:
        n = builder.insert_element(ir.Constant(_WHOLE, ir.Undefined), builder.trunc(n, _INT), WORD(0))
        bound = _shuffle(builder, n, [0] * COUNT)
        inside = builder.icmp_signed("<", ir.Constant(_WHOLE, list(range(COUNT))), bound)
        return builder.select(inside, v, splat(builder, rest))

    return _code(LANES(LANES, types.int64, types.float32), emit)


@intrinsic
def total(typing: Any, v: Any) -> Any:
    """The sum over the lanes, added in pairs."""
    return _reduction(lambda builder, a, b: builder.fadd(a, b))


@intrinsic
def largest(typing: Any, v: Any) -> Any:
    """The largest of the lanes."""
    return _reduction(_max)


def _reduction(fold: Any) -> Any:
    def emit(builder: Any, v: Any) -> Any:
        for distance in (8, 4, 2, 1):
            v = fold(builder, v, _shuffle(builder, v, [(i + distance) % COUNT for i in range(COUNT)]))
        return builder.extract_element(v, WORD(0))

    return _code(types.float32(LANES), emit)


@intrinsic
def _cut(typing: Any, v: Any) -> Any:
    """Each lane rounded towards zero to an integer."""
    return _code(LANES(LANES), lambda builder, v: builder.sitofp(builder.fptosi(v, _WHOLE), VECTOR))


@intrinsic
def _power(typing: Any, q: Any) -> Any:
    """2^q for integers q above -127, by writing q into the exponent's bits."""

    def emit(builder: Any, q: Any) -> Any:
        biased = builder.add(builder.fptosi(q, _WHOLE), ir.Constant(_WHOLE, [127] * COUNT))
        return builder.bitcast(builder.shl(biased, ir.Constant(_WHOLE, [23] * COUNT)), VECTOR)

    return _code(LANES(LANES), emit)


@intrinsic
def turn(typing: Any, to: Any, o: Any, down: Any, x: Any, at: Any, under: Any, n: Any) -> Any:
    """Write the transpose of a block of 16 x 16 numbers of ``x`` to ``to``.

    The block begins at ``at``, and its rows are ``under`` numbers apart. The result begins at ``o``, and its rows are
    ``down`` numbers apart. Only the first n rows of ``x`` are read; zeros replace the others.
    """

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        to, o, down, x, at, under, n = values
        last, zero, rows = builder.sub(n, WORD(1)), ir.Constant(VECTOR, [0.0] * COUNT), []
        for i in range(COUNT):
            there = builder.icmp_signed("<", WORD(i), n)
            row = builder.select(there, WORD(i), last)
            from_ = pointer(context, builder, signature.args[3], x, builder.add(at, builder.mul(row, under)))
            read = builder.load(builder.bitcast(from_, VECTOR.as_pointer()), align=4)
            rows.append(builder.select(there, read, zero))
        for d in (1, 2, 4, 8):  # swap the blocks of d x d next to the diagonal
            upper = [i if not i & d else COUNT + i - d for i in range(COUNT)]
            lower = [i + d if not i & d else COUNT + i for i in range(COUNT)]
            new = list(rows)
            for i in range(COUNT):
                if not i & d:
                    new[i] = _shuffle(builder, rows[i], upper, rows[i + d])
                    new[i + d] = _shuffle(builder, rows[i], lower, rows[i + d])
            rows = new
        for i, row in enumerate(rows):
            there = pointer(context, builder, signature.args[0], to, builder.add(o, builder.mul(WORD(i), down)))
            builder.store(row, builder.bitcast(there, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(to, i8, i8, x, i8, i8, i8), generate


def exp(z: Any) -> Any:
    """max(e^z, e^-87) in each lane, for z of at most 0, with a relative error of at most 2e-7.

    e^z = 2^q e^t with t = z - q ln 2 in [-ln 2 / 2, ln 2 / 2]. The constant ln 2 is split into two parts, so that q
    ln 2 is exact. The polynomial of Cephes' expf gives e^t.
    """
    t = larger(z, all_of(F(-87)))
    q = _cut(fma(t, all_of(F(1.4426950408889634)), all_of(F(-0.5))))
    t = fma(q, all_of(F(-0.693359375)), t)
    t = fma(q, all_of(F(2.12194440e-4)), t)
    p = fma(all_of(F(1.9875691500e-4)), t, all_of(F(1.3981999507e-3)))
    p = fma(p, t, all_of(F(8.3334519073e-3)))
    p = fma(p, t, all_of(F(4.1665795894e-2)))
    p = fma(p, t, all_of(F(1.6666665459e-1)))
    p = fma(p, t, all_of(F(5.0000001201e-1)))
    return times(fma(times(p, t), t, fma(t, all_of(F(1)), all_of(F(1)))), _power(q))


exp = part(exp, maths=EXACT)
