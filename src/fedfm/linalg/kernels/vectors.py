"""Operations on vectors of eight 64-bit integers, for compiled loops. LLVM maps them to any processor's registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 8


@intrinsic
def transpose8(typingctx, source, start, stride, target, begin, step):  # type: ignore[no-untyped-def]
    """Write the transpose of an 8 x 8 matrix of int64.

    Row k begins at source[start + k stride], and column k is written to target[begin + k step] and the next entries.
    Both arrays are contiguous vectors. There is no check of their bounds.
    """
    signature = types.void(source, types.intp, types.intp, target, types.intp, types.intp)
    return signature, _transpose


def _transpose(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    number, lane = ir.IntType(64), ir.IntType(32)
    row = ir.VectorType(number, LANES)
    source, start, stride, target, begin, step = arguments
    read = context.make_array(signature.args[0])(context, builder, source).data
    write = context.make_array(signature.args[3])(context, builder, target).data

    def place(base: Any, first: Any, distance: Any, k: int) -> Any:
        at = builder.add(first, builder.mul(distance, ir.Constant(number, k)))
        return builder.bitcast(builder.gep(base, [at]), row.as_pointer())

    rows = [builder.load(place(read, start, stride, k), align=8) for k in range(LANES)]
    for half in (1, 2, 4):  # exchange the off-diagonal blocks of this size
        upper = [LANES + i - half if i & half else i for i in range(LANES)]
        lower = [LANES + i if i & half else i + half for i in range(LANES)]
        masks = [ir.Constant(ir.VectorType(lane, LANES), order) for order in (upper, lower)]
        for k in (k for k in range(LANES) if not k & half):
            pair = rows[k], rows[k + half]
            rows[k], rows[k + half] = (builder.shuffle_vector(*pair, mask) for mask in masks)
    for k in range(LANES):
        builder.store(rows[k], place(write, begin, step, k), align=8)
    return context.get_dummy_value()
