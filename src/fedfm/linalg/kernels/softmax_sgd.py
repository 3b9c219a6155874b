"""Local training of one linear head in compiled loops: all steps of a client in one call.

The weights are stored transposed, as (d, C'): C' is the number of classes C, rounded up to a multiple of 16, and the
columns after the first C are zero. So one tiled product (:mod:`fedfm.linalg.kernels.matmul`) computes both the logits
and the update of the weights, and no sum runs across lanes. The rows of a batch are first copied to adjacent memory.
The caller allocates the scratch memory.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import EXACT, aligned_empty, compile_cached, compile_part, part
from fedfm.linalg.kernels.matmul import product, transpose
from fedfm.linalg.kernels.simd import COUNT, all_of, exp, first, fma, larger, largest, load, minus, store, times, turn
from fedfm.linalg.kernels.simd import total as sum_of

F = np.float32  # numba treats a literal 1.0 as a float64, and its product with a float32 is a float64

_part = partial(part, maths=EXACT)


def lanes(n: int) -> int:
    """Round n up to a multiple of 16: C' for C classes, d' for d features, n' for n rows."""
    return -(-n // COUNT) * COUNT


_kept = threading.local()


def _scratch(*sizes: int) -> tuple[Any, ...]:
    """Uninitialised flat vectors of these sizes; a thread reuses the vectors of its last call if the sizes agree."""
    if getattr(_kept, "sizes", None) != sizes:
        _kept.sizes, _kept.scratch = sizes, tuple(map(aligned_empty, sizes))
    return _kept.scratch  # type: ignore[no-any-return]


def scratch(rows: int, d: int, classes: int) -> tuple[Any, ...]:
    """Scratch memory of :func:`descend`, for batches of B = ``rows`` rows.

    It has the transposed weights (d C' + 256), the bias (C'), a batch's rows (B d) and the batch's logits (B C').
    """
    width = lanes(classes)
    return _scratch(d * width + COUNT * COUNT, width, rows * d, rows * width)


def scratch_in_span(rows: int, d: int, classes: int, n: int) -> tuple[Any, ...]:
    """Scratch memory of :func:`descend_in_span` for n rows in batches of ``rows`` rows."""
    width, deep, many = lanes(classes), lanes(d), lanes(n)
    own = deep * width + COUNT * COUNT, width, rows * n, rows * width
    return _scratch(*own, n * deep, deep * many, n * many, n * width, n * width)


@compile_part
def _from_weights(w: Any, b: Any, wt: Any, bt: Any) -> None:
    """Copy weights (C d) and bias (C) of a head to ``wt`` (d C') and ``bt`` (C')."""
    classes, width = len(b), len(bt)
    d = len(w) // classes
    whole = d // COUNT * COUNT
    transpose(w, 0, d, classes, width, whole, wt, 0)
    for j in range(whole, d):
        for c in range(width):
            wt[j * width + c] = w[c * d + j] if c < classes else F(0)
    for c in range(width):
        bt[c] = b[c] if c < classes else F(0)


@compile_part
def _to_weights(wt: Any, bt: Any, w: Any, b: Any) -> None:
    """The inverse of :func:`_from_weights`. The last 256 entries of ``wt`` are scratch for a block of 16 x 16."""
    classes, width = len(b), len(bt)
    d = len(w) // classes
    whole, left = d // COUNT * COUNT, d * width
    full = classes // COUNT * COUNT
    for c in range(0, full, COUNT):
        for j in range(0, whole, COUNT):
            turn(w, c * d + j, d, wt, j * width + c, width, COUNT)
    for j in range(0, whole if full < classes else 0, COUNT):
        turn(wt, left, COUNT, wt, j * width + full, width, COUNT)
        for k in range(classes - full):
            store(w, (full + k) * d + j, load(wt, left + k * COUNT))
    for j in range(whole, d):
        for c in range(classes):
            w[c * d + j] = wt[j * width + c]
    for c in range(classes):
        b[c] = bt[c]


@_part
def _errors(z: Any, rows: Any, y: Any, classes: int, width: int, scale: Any) -> Any:
    """Replace logits z (B C') by scale (softmax(z) - one-hot), with zeros behind the C classes.

    Returns the sum of the cross-entropies.
    """
    loss = 0.0
    for i in range(len(rows)):
        row = i * width
        top = first(load(z, row), classes, F(-np.inf))
        for j in range(COUNT, width, COUNT):
            top = larger(top, first(load(z, row + j), classes - j, F(-np.inf)))
        most = largest(top)
        loss += most - z[row + y[rows[i]]]
        highest, sums = all_of(most), all_of(F(0))
        for j in range(0, width, COUNT):
            e = first(exp(minus(load(z, row + j), highest)), classes - j, F(0))
            store(z, row + j, e)
            sums = fma(e, all_of(F(1)), sums)
        total = sum_of(sums)
        loss += math.log(total)
        share = all_of(scale / total)
        for j in range(0, width, COUNT):
            store(z, row + j, times(load(z, row + j), share))
        z[row + y[rows[i]]] -= scale
    return loss


@_part
def _add_rows(z: Any, m: int, b: Any) -> None:
    """Add the first m rows of ``z``, each as long as ``b``, to ``b``."""
    for i in range(m):
        for c in range(0, len(b), COUNT):
            store(b, c, fma(load(z, i * len(b) + c), all_of(F(1)), load(b, c)))


@_part
def _scale(v: Any, keep: Any) -> None:
    if keep != F(1):
        for k in range(len(v)):
            v[k] *= keep


@_part
def _step(
    x: Any, y: Any, rows: Any, wt: Any, bt: Any, to_w: Any, to_b: Any, near: Any, z: Any, classes: int, scale: Any,
    keep: Any, keep_b: Any,
) -> Any:  # fmt: skip
    """One step: ``to_w`` <- ``keep`` * ``to_w`` + ``scale`` * gradient, and likewise ``to_b`` with ``keep_b``.

    The loss is the sum of a batch's cross-entropies. Its gradient is computed at ``wt``, ``bt``. Returns the loss.
    """
    d, m, width = x.shape[1], len(rows), len(bt)
    for i in range(m):
        r = rows[i]
        for j in range(d):
            near[i * d + j] = x[r, j]
        for c in range(0, width, COUNT):
            store(z, i * width + c, load(bt, c))
    product(z, 0, width, width, True, near, 0, d, 1, m, wt, 0, width, d)
    loss = _errors(z, rows, y, classes, width, scale)
    _scale(to_w[: d * width], keep)
    _scale(to_b, keep_b)
    product(to_w, 0, width, width, True, near, 0, 1, d, d, z, 0, width, m)
    _add_rows(z, m, to_b)
    return loss


_DATA, _F, _I = "f4[:,::1], i8[::1]", "f4[::1]", "i8[::1]"
_ROOM = ", ".join([_F] * 4)
_HEAD = f"{_F}, {_F}, i8, i8, i8"


@partial(compile_cached, maths=EXACT, signature=f"f8({_DATA}, i8[:,::1], i8, {_HEAD}, f8, f8, f8, {_ROOM})")
def descend(
    x: Any, y: Any, orders: Any, size: int, start: Any, trained: Any, at_w: int, at_b: int, classes: int,
    eta: float, decay: float, decay_b: float, wt: Any, bt: Any, near: Any, z: Any,
) -> float:  # fmt: skip
    """Plain SGD on the weights; returns the mean cross-entropy of a batch, averaged over all steps.

    Args:
        x, y: rows (n, d) and labels (n,) in 0..C-1.
        orders: (E, m), m > 0. Row e has the indices of the m training rows in the order of epoch e.
        size: B, rows in a batch.
        start: vector with the initial head: weight (C d) from ``at_w`` on, bias (C,) from ``at_b`` on.
        trained: vector that receives the trained head, in the same places.
        classes: C.
        eta, decay, decay_b: a step is -eta (gradient + (decay w, decay_b b)).
        wt, bt, near, z: from :func:`scratch` for min(size, m) rows.
    """
    d, m, loss, steps = x.shape[1], orders.shape[1], 0.0, 0
    keep, keep_b = F(1 - eta * decay), F(1 - eta * decay_b)
    w, b = slice(at_w, at_w + classes * d), slice(at_b, at_b + classes)
    _from_weights(start[w], start[b], wt, bt)
    for epoch in range(orders.shape[0]):
        for at in range(0, m, size):
            rows = orders[epoch, at : min(at + size, m)]
            loss += _step(x, y, rows, wt, bt, wt, bt, near, z, classes, F(-eta) / F(len(rows)), keep, keep_b) / len(
                rows
            )
            steps += 1
    _to_weights(wt, bt, trained[w], trained[b])
    return float(loss / steps)


@partial(compile_cached, maths=EXACT, signature=f"f8({_DATA}, {_I}, {_F}, {_F}, {_F}, {_F}, {_ROOM}, {_F}, {_F})")
def gradient(
    x: Any, y: Any, rows: Any, w: Any, b: Any, g_w: Any, g_b: Any, wt: Any, bt: Any, near: Any, z: Any, gt: Any,
    gb: Any,
) -> float:  # fmt: skip
    """The mean cross-entropy of the batch ``rows`` (m,), m > 0; writes its gradient to ``g_w`` (C d) and ``g_b`` (C,).

    ``wt``, ``bt``, ``near`` and ``z`` are those of :func:`descend`; ``gt`` and ``gb`` have the sizes of ``wt``, ``bt``.
    """
    _from_weights(w, b, wt, bt)
    gt[:] = F(0)
    gb[:] = F(0)
    loss = _step(x, y, rows, wt, bt, gt, gb, near, z, len(b), F(1) / F(len(rows)), F(1), F(1))
    _to_weights(gt, gb, g_w, g_b)
    return float(loss / len(rows))


@partial(
    compile_cached,
    maths=EXACT,
    signature=f"f8({_DATA}, i8[:,::1], i8, {_HEAD}, f8, f8, {_ROOM}, {_F}, {_F}, {_F}, {_F}, {_F})",
)
def descend_in_span(
    x: Any, y: Any, orders: Any, size: int, start: Any, trained: Any, at_w: int, at_b: int, classes: int,
    eta: float, decay: float, wt: Any, bt: Any, near: Any, z: Any, xs: Any, xt: Any, gram: Any, first_z: Any, a: Any,
) -> float:  # fmt: skip
    """:func:`descend` on weights that are kept as coefficients of the rows, see :mod:`fedfm.training.heads`.

    Args:
        x, y, orders, size, start, trained, at_w, at_b, classes, eta: as in :func:`descend`; ``orders`` is (E, n).
        decay: a step is -eta (gradient + decay (w, b)).
        wt, bt, near, z, and the following: from :func:`scratch_in_span`.
        xs, xt: the rows (n d') and their transpose (d' n'), with zeros behind the d features. They are in the order of
            the first epoch: during that epoch, the rows that already have coefficients come first.
        gram: X X^T + 1 (n n').
        first_z: X W_0^T + b_0 (n C').
        a: the coefficients (n C').
    """
    (n, d), width = x.shape, len(bt)
    many, deep = len(xt) // (len(xs) // n), len(xs) // n  # n', d'
    loss, steps, scale, keep = 0.0, 0, F(1), F(1 - eta * decay)
    place, labels = np.empty(n, np.int64), np.empty(n, np.int64)
    w, b = slice(at_w, at_w + classes * d), slice(at_b, at_b + classes)
    _from_weights(start[w], start[b], wt, bt)
    wt[d * width : deep * width] = F(0)
    for i in range(n):
        r = orders[0, i]
        place[r], labels[i] = i, y[r]
        for j in range(d):
            xs[i * deep + j] = x[r, j]
        xs[i * deep + d : (i + 1) * deep] = F(0)
        for c in range(0, width, COUNT):
            store(first_z, i * width + c, load(bt, c))
    transpose(xs, 0, deep, n, many, deep, xt, 0)
    product(first_z, 0, width, width, True, xs, 0, deep, 1, n, wt, 0, width, deep)
    gram[:] = F(1)
    product(gram, 0, many, many, True, xs, 0, deep, 1, n, xt, 0, many, deep)
    a[:] = F(0)
    for epoch in range(orders.shape[0]):
        for at in range(0, n, size):
            rows = place[orders[epoch, at : min(at + size, n)]]
            m, seen = len(rows), n if epoch else at
            for i in range(m):
                r = rows[i]
                for k in range(seen):
                    near[i * n + k] = gram[r * many + k]
                for c in range(width):
                    z[i * width + c] = scale * first_z[r * width + c]
            product(z, 0, width, width, True, near, 0, n, 1, m, a, 0, width, seen)
            loss += _errors(z, rows, labels, classes, width, F(-eta) / F(m)) / m
            steps += 1
            scale *= keep
            _scale(a, keep)
            for i in range(m):
                for c in range(0, width, COUNT):
                    to = rows[i] * width + c
                    store(a, to, fma(load(z, i * width + c), all_of(F(1)), load(a, to)))
    _scale(wt[: d * width], scale)
    _scale(bt, scale)
    product(wt, 0, width, width, True, xs, 0, 1, deep, d, a, 0, width, n)
    _add_rows(a, n, bt)
    _to_weights(wt, bt, trained[w], trained[b])
    return float(loss / steps)
