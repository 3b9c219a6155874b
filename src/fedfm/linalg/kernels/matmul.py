"""Products of small float32 matrices in compiled loops, by tiles of up to 8 rows and 32 columns.

Matrices are parts of flat vectors. Offsets and strides are counted in entries, not in bytes, and are not checked. The
terms of an entry are added in the same order with tiles of any size.
"""

from __future__ import annotations

from typing import Any

from numba.core import cgutils, types

from fedfm.linalg.kernels.jit import WHOLE_REGISTERS, compile_part
from fedfm.linalg.kernels.simd import CONTRACT, COUNT, VECTOR, WORD, intrinsic, pointer, splat, turn

ROWS = 8 if WHOLE_REGISTERS else 4  # rows of a tile
WIDE = 2 if WHOLE_REGISTERS else 1  # values of type Lanes in a row of a tile; a tile's sums fill half of the registers


def _tile(lanes: int) -> Any:
    """Make the intrinsic for a tile of ``ROWS`` rows, each of ``lanes`` values of type ``Lanes``.

    It writes sum_k a[p + i row + k step] b[q + k under + j] to ``out[o + i down + j]``, or adds it if ``add`` is true.
    If fewer than ``ROWS`` rows are left, the last row is computed several times.
    """

    def tile(
        typing: Any, out: Any, o: Any, down: Any, add: Any, a: Any, p: Any, row: Any, step: Any, b: Any, q: Any,
        under: Any, n: Any, rows: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            out, o, down, add, a, p, row, step, b, q, under, n, rows = values
            kinds, last = signature.args, builder.sub(rows, WORD(1))

            def vector(kind: Any, array: Any, at: Any, lane: int) -> Any:
                there = pointer(context, builder, kind, array, builder.add(at, WORD(lane * COUNT)))
                return builder.bitcast(there, VECTOR.as_pointer())

            begins, targets, sums = [], [], []
            for i in range(ROWS):
                row_i = builder.select(builder.icmp_signed("<", last, WORD(i)), last, WORD(i))
                begins.append(builder.add(p, builder.mul(row_i, row)))
                to = builder.add(o, builder.mul(row_i, down))
                targets.append([vector(kinds[0], out, to, lane) for lane in range(lanes)])
                sums.append([cgutils.alloca_once(builder, VECTOR) for _ in range(lanes)])
                for at, total in zip(targets[i], sums[i], strict=True):
                    before = builder.select(add, builder.load(at, align=4), VECTOR(None))
                    builder.store(before, total)
            with cgutils.for_range(builder, n) as loop:
                k = loop.index
                below = builder.add(q, builder.mul(k, under))
                right = [builder.load(vector(kinds[8], b, below, lane), align=4) for lane in range(lanes)]
                column = builder.mul(k, step)
                for begin, of in zip(begins, sums, strict=True):
                    left = splat(
                        builder, builder.load(pointer(context, builder, kinds[4], a, builder.add(begin, column)))
                    )
                    for y, total in zip(right, of, strict=True):
                        term = builder.fmul(left, y, flags=CONTRACT)
                        builder.store(builder.fadd(term, builder.load(total), flags=CONTRACT), total)
            for to, of in zip(targets, sums, strict=True):
                for at, total in zip(to, of, strict=True):
                    builder.store(builder.load(total), at, align=4)
            return context.get_dummy_value()

        i8 = types.int64
        return types.void(out, i8, i8, types.boolean, a, i8, i8, i8, b, i8, i8, i8, i8), generate

    return intrinsic(tile)


_one, _wide = _tile(1), _tile(WIDE)


@compile_part
def product(
    out: Any, o: int, down: int, width: int, add: bool, a: Any, p: int, row: int, step: int, rows: int, b: Any, q: int,
    under: int, n: int,
) -> None:  # fmt: skip
    """Write the product of two matrices to ``out``, or add it to the entries of ``out`` if ``add`` is true.

    Shapes: (rows, n) times (n, width) gives (rows, width). ``rows`` is at least 1, ``width`` a multiple of 16. Entries:

    - left matrix, (i, k): ``a[p + i row + k step]``
    - right matrix, (k, j): ``b[q + k under + j]``
    - product, (i, j): ``out[o + i down + j]``
    """
    whole = width // (WIDE * COUNT) * (WIDE * COUNT)
    if rows < n:  # the right matrix is the larger one: a few of its columns stay in the nearest cache for all rows
        for j in range(0, whole, WIDE * COUNT):
            for i in range(0, rows, ROWS):
                left, here = p + i * row, min(rows - i, ROWS)
                _wide(out, o + i * down + j, down, add, a, left, row, step, b, q + j, under, n, here)
        for j in range(whole, width, COUNT):
            for i in range(0, rows, ROWS):
                left, here = p + i * row, min(rows - i, ROWS)
                _one(out, o + i * down + j, down, add, a, left, row, step, b, q + j, under, n, here)
    else:
        for i in range(0, rows, ROWS):
            left, here = p + i * row, min(rows - i, ROWS)
            for j in range(0, whole, WIDE * COUNT):
                _wide(out, o + i * down + j, down, add, a, left, row, step, b, q + j, under, n, here)
            for j in range(whole, width, COUNT):
                _one(out, o + i * down + j, down, add, a, left, row, step, b, q + j, under, n, here)


@compile_part
def transpose(x: Any, at: int, under: int, n: int, wide: int, size: int, to: Any, o: int) -> None:
    """Write the transpose of a block of ``x`` (n, size) to ``to`` (size, wide), with zeros behind the n columns.

    The block begins at ``at``, and its rows are ``under`` numbers apart. The result begins at ``o``. ``size`` and
    ``wide`` are multiples of 16.
    """
    for c in range(0, size, COUNT):
        for j in range(0, wide, COUNT):
            turn(to, o + c * wide + j, wide, x, at + c + j * under, under, n - j)
