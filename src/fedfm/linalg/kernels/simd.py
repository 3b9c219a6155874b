"""Sixteen float32 numbers as one value in compiled loops, for what the compiler would not put into vector lanes itself.

Loops over a few dozen numbers, or with many accumulators, are left scalar by LLVM, or take longer to set up than to
run. A value of ``Lanes`` lives in a register (in two or four where those are narrower). Offsets are in numbers; nothing
checks them. Products and sums may be contracted: rounded once.
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
    """Where entry ``at`` of an array of this kind lies."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def splat(builder: Any, x: Any) -> Any:
    """The number in all lanes."""
    return _permuted(builder, builder.insert_element(ir.Constant(VECTOR, ir.Undefined), x, WORD(0)), [0] * COUNT)


def _permuted(builder: Any, a: Any, lanes: list[int], b: Any = None) -> Any:
    return builder.shuffle_vector(a, a if b is None else b, ir.Constant(_WHOLE, lanes))


@intrinsic
def load(typing: Any, x: Any, at: Any) -> Any:
    """Entries at, at + 1, ... of the vector ``x``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        there = pointer(context, builder, signature.args[0], *values)
        return builder.load(builder.bitcast(there, VECTOR.as_pointer()), align=4)

    return LANES(x, types.int64), generate


@intrinsic
def store(typing: Any, x: Any, at: Any, v: Any) -> Any:
    """Write ``v`` to entries at, at + 1, ... of the vector ``x``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        there = pointer(context, builder, signature.args[0], *values[:2])
        builder.store(values[2], builder.bitcast(there, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(x, types.int64, LANES), generate


@intrinsic
def all_of(typing: Any, x: Any) -> Any:
    """The number in all lanes."""
    return LANES(types.float32), lambda context, builder, signature, values: splat(builder, values[0])


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Lanes a b + c."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b, c = values
        return builder.fadd(builder.fmul(a, b, flags=CONTRACT), c, flags=CONTRACT)

    return LANES(LANES, LANES, LANES), generate


@intrinsic
def times(typing: Any, a: Any, b: Any) -> Any:
    """Lanes a b."""
    return LANES(LANES, LANES), lambda context, builder, signature, v: builder.fmul(*v, flags=CONTRACT)


@intrinsic
def minus(typing: Any, a: Any, b: Any) -> Any:
    """Lanes a - b."""
    return LANES(LANES, LANES), lambda context, builder, signature, v: builder.fsub(*v, flags=CONTRACT)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """Lanes max(a, b); a where it is not a number."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        a, b = values
        return builder.select(builder.fcmp_ordered("<", a, b), b, a)

    return LANES(LANES, LANES), generate


@intrinsic
def first(typing: Any, v: Any, n: Any, rest: Any) -> Any:
    """The first n lanes of ``v``, the number ``rest`` in the others."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        v, n, rest = values
        n = builder.insert_element(ir.Constant(_WHOLE, ir.Undefined), builder.trunc(n, _INT), WORD(0))
        bound = _permuted(builder, n, [0] * COUNT)
        inside = builder.icmp_signed("<", ir.Constant(_WHOLE, list(range(COUNT))), bound)
        return builder.select(inside, v, splat(builder, rest))

    return LANES(LANES, types.int64, types.float32), generate


@intrinsic
def total(typing: Any, v: Any) -> Any:
    """The sum over the lanes, in pairs."""
    return _folded(lambda builder, a, b: builder.fadd(a, b))


@intrinsic
def largest(typing: Any, v: Any) -> Any:
    """The largest of the lanes."""
    return _folded(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


def _folded(fold: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        (v,) = values
        for distance in (8, 4, 2, 1):
            v = fold(builder, v, _permuted(builder, v, [(i + distance) % COUNT for i in range(COUNT)]))
        return builder.extract_element(v, WORD(0))

    return types.float32(LANES), generate


@intrinsic
def _cut(typing: Any, v: Any) -> Any:
    """Whole numbers, towards zero."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.sitofp(builder.fptosi(values[0], _WHOLE), VECTOR)

    return LANES(LANES), generate


@intrinsic
def _power(typing: Any, q: Any) -> Any:
    """2^q for whole numbers q above -127, by their bits."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        biased = builder.add(builder.fptosi(values[0], _WHOLE), ir.Constant(_WHOLE, [127] * COUNT))
        return builder.bitcast(builder.shl(biased, ir.Constant(_WHOLE, [23] * COUNT)), VECTOR)

    return LANES(LANES), generate


@intrinsic
def turn(typing: Any, to: Any, o: Any, down: Any, x: Any, at: Any, under: Any, n: Any) -> Any:
    """Sixteen rows of lanes of ``x``, ``under`` apart, become columns of ``to``, whose rows are ``down`` apart; behind
    the n-th row of ``x`` nothing is read, zeros are written.
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
        for d in (1, 2, 4, 8):  # blocks of d x d change places beside the diagonal
            upper = [i if not i & d else COUNT + i - d for i in range(COUNT)]
            lower = [i + d if not i & d else COUNT + i for i in range(COUNT)]
            new = list(rows)
            for i in range(COUNT):
                if not i & d:
                    new[i] = _permuted(builder, rows[i], upper, rows[i + d])
                    new[i + d] = _permuted(builder, rows[i], lower, rows[i + d])
            rows = new
        for i, row in enumerate(rows):
            there = pointer(context, builder, signature.args[0], to, builder.add(o, builder.mul(WORD(i), down)))
            builder.store(row, builder.bitcast(there, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    i8 = types.int64
    return types.void(to, i8, i8, x, i8, i8, i8), generate


def exponential(z: Any) -> Any:
    """Lanes e^z for z of at most 0, at least e^-87, to 2e-7.

    e^z = 2^q e^t with t = z - q ln 2 in [-ln 2 / 2, ln 2 / 2] (ln 2 in two parts, so that q ln 2 is exact), e^t by the
    polynomial of Cephes' expf.
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


exponential = part(exponential, maths=EXACT)
