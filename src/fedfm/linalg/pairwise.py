"""All inner products of K parameter vectors, and weighted sums of them, as matrix products.

A server that computes a model for each client needs K^2 inner products and K weighted sums of K vectors (FedBip,
equations 3 to 6; FedAMP). One by one, these computations would read 2 K^2 vectors. Here a block of columns of all
vectors is multiplied at once, so that each vector is read once for the products and once for the sums.

Vectors and results may be in files larger than memory (``fedfm.linalg.out_of_core``). The results have the same bits in
memory and in files, and with any number of threads, because the blocks and the order of the sums are fixed
(``fedfm.linalg.column_blocks``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedfm.linalg.column_blocks import (
    PIECE,
    Rows,
    Stretch,
    Workspace,
    blocks,
    columns_of,
    in_files,
    in_order,
    join_spans,
    rows_of,
    schedule_of,
    windows,
)
from fedfm.linalg.out_of_core import allocate
from fedfm.linalg.params import Layout, Params


def gram(
    vectors: Sequence[Params],
    layers: Sequence[Sequence[str]] | None = None,
    *,
    centre: bool = False,
    threads: int | None = None,
) -> np.ndarray:
    """Inner products <x_i, x_k> of all pairs, layer by layer, for cosines, norms and distances.

    Products and sums are in float64.

    Args:
        vectors: K vectors of one layout.
        layers: for each of the L layers, the names of its tensors, in any order; None: all tensors are one layer. Only
            floating-point entries count.
        centre: subtract from x_i its mean over the layer's entries, as in Pearson's correlation. This reads the vectors
            twice.
        threads: largest number of threads; None: the number of cores. The result's bits do not depend on it.

    Returns:
        (L, K, K) float64, symmetric. If a vector has a NaN or infinity, its row and column are not finite.

    Raises:
        KeyError: names differ, or a layer's name is unknown.
        ValueError: shapes or dtypes differ, a name is in two layers, or there is no vector.

    Example:
        >>> tau = [Params({"w": torch.tensor(t)}) for t in ([3.0, 0.0], [3.0, 4.0], [0.0, -2.0])]
        >>> gram(tau)[0].tolist()
        [[9.0, 9.0, 0.0], [9.0, 25.0, -8.0], [0.0, -8.0, 4.0]]
    """
    layout = _layout_of(vectors)
    runs = [join_spans(layout, names) for names in _layer_names(layout, layers)]
    count, sizes = len(vectors), [sum(r.stop - r.start for r in of) for of in runs]
    rows = rows_of(vectors)
    plan = schedule_of(runs, count, in_files(rows), threads)
    means = np.zeros((len(runs), count))
    found = np.zeros((len(runs), count, count))
    if centre:
        for at, sums in in_order(lambda s, workspace: _sums(s, rows, workspace, count), plan):
            means[at.layer] += sums / sizes[at.layer]
    for at, products in in_order(lambda s, workspace: _products(s, rows, workspace, means[s.layer]), plan):
        found[at.layer] += products
    return found


def mix(
    weights: np.ndarray,
    vectors: Sequence[Params],
    layers: Sequence[Sequence[str]] | None = None,
    onto: Sequence[Params] | None = None,
    *,
    threads: int | None = None,
    most: int | None = None,
) -> list[Params]:
    """onto_i + sum_k weights[l, i, k] x_k for every row i, layer by layer: FedBip, Algorithm 1, lines 8 to 17.

    Sums run in float32 (float64 for float64 entries). If all rows have an ``onto`` of the same bits, it is one more
    term of the sums. Otherwise each row's own ``onto`` is added last.

    Args:
        weights: (L, M, K).
        vectors: K vectors of one layout; each is read once.
        layers: as in :func:`gram`.
        onto: M vectors of the same layout, which may all be one vector; None means zero.
        threads: as in :func:`gram`.
        most: bytes of results in memory, as in :func:`fedfm.linalg.out_of_core.allocate`.

    Returns:
        M vectors of the same layout. Entries that are outside the layers or not floating-point are copied from
        ``onto``; without ``onto`` they are copied from ``vectors`` if M = K.

    Raises:
        KeyError: names differ, or a layer's name is unknown.
        ValueError: shapes or dtypes differ, a name is in two layers, the weights are not (L, M, K), or the entries
            outside the layers are undefined.
        OSError: the results fit neither into ``most`` nor on the disk.

    Example:
        >>> tau = [Params({"w": torch.tensor(t)}) for t in ([3.0, 0.0], [3.0, 4.0])]
        >>> [m["w"].tolist() for m in mix(np.array([[[0.5, 0.5], [0.0, 1.0]]]), tau)]
        [[3.0, 2.0], [3.0, 4.0]]
    """
    layout = _layout_of(vectors)
    checked = _layer_names(layout, layers)
    weights = np.asarray(weights, np.float64)
    if weights.ndim != 3 or weights.shape[::2] != (len(checked), len(vectors)):
        raise ValueError(f"weights of shape {weights.shape}, expected ({len(checked)}, M, {len(vectors)})")
    count = weights.shape[1]
    for x in onto or ():
        x.check_like(layout)
    if onto is not None and len(onto) != count:
        raise ValueError(f"onto has {len(onto)} vectors, but the weights have {count} rows")
    inside = {n for names in checked for n in names if layout.slots[n][0].is_floating_point}
    rest = join_spans(layout, (n for n in layout.slots if n not in inside), floating=False)
    base = onto if onto is not None else vectors if len(vectors) == count else None
    if rest and base is None:
        raise ValueError(f"{count} rows of weights for {len(vectors)} vectors: entries outside the layers need onto")
    made = allocate(count, layout, most)
    if not made:
        return []
    runs = [join_spans(layout, names) for names in checked]
    # One more term saves one more pass. Bits are compared: whether vectors are one object depends on the memory.
    if onto is not None and all(_equal(x, onto[0]) for x in onto):
        weights = np.concatenate([weights, np.ones((len(weights), count, 1))], axis=2)
        vectors, onto = [*vectors, onto[0]], None
    rows, targets, added = rows_of(vectors), rows_of(made), None if onto is None else rows_of(onto)
    files = in_files(rows, targets, added or {})
    plan = schedule_of(runs, max(count, len(vectors)), files, threads)
    for _ in in_order(lambda s, workspace: _mix(s, weights[s.layer], rows, added, targets, workspace), plan):
        pass
    for i, new in enumerate(made):
        for dtype, start, stop in rest:
            new.flats[dtype][start:stop] = base[i].flats[dtype][start:stop]  # type: ignore[index]
    return made


# --- computations of one thread ---------------------------------------------------------------------------------------


def _products(stretch: Stretch, rows: Rows, workspace: Workspace, means: np.ndarray) -> np.ndarray:
    """(K, K) float64: inner products of the vectors minus their means, over one stretch."""
    count = len(means)
    near = means.astype(stretch.dtype)  # the rounding error of these means is corrected below
    total = np.zeros((count, count))
    for _, window in windows(stretch, rows, workspace.buffer("x", stretch, count)):
        with workspace.turn:
            for x in blocks(stretch, window):  # (K, n)
                wide = np.subtract(x, near[:, None], dtype=np.float64)
                total += wide @ wide.T
    left = means - near
    total -= columns_of(stretch) * np.outer(left, left)
    return total


def _sums(stretch: Stretch, rows: Rows, workspace: Workspace, count: int) -> np.ndarray:
    """(K,) float64: the sum of each vector's entries over one stretch."""
    total = np.zeros(count)
    for _, window in windows(stretch, rows, workspace.buffer("x", stretch, count)):
        with workspace.turn:
            for x in blocks(stretch, window):
                total += x.sum(1, dtype=np.float64)
    return total


def _mix(
    stretch: Stretch, weights: np.ndarray, rows: Rows, added: Rows | None, targets: Rows, workspace: Workspace
) -> None:
    """Write onto + weights x over the stretch into the targets."""
    weights = weights.astype(stretch.dtype)  # (M, K)
    for runs, x in windows(stretch, rows, workspace.buffer("x", stretch, weights.shape[1])):
        y = workspace.buffer("y", stretch, len(weights))[:, : x.shape[1]]
        with workspace.turn:
            for x_n, y_n in zip(blocks(stretch, x), blocks(stretch, y), strict=True):
                np.matmul(weights, x_n, out=y_n)
        at = 0
        for dtype, start, stop in runs:
            here = slice(at, at + stop - start)
            at = here.stop
            for i, row in enumerate(y[:, here]):
                targets[dtype][i].put(start, row, added and added[dtype][i].part(start, stop))


# --- checks of arguments ----------------------------------------------------------------------------------------------


def _layout_of(vectors: Sequence[Params]) -> Layout:
    if not vectors:
        raise ValueError("no vectors")
    for x in vectors:
        x.check_like(vectors[0].layout)
    return vectors[0].layout


def _equal(x: Params, y: Params) -> bool:
    """Whether two vectors of one layout have the same bits, read up to the first piece that differs."""
    if x is y:
        return True
    for d in x.flats:
        a, b = (torch.split(w.flats[d].view(torch.uint8), PIECE) for w in (x, y))
        if not all(map(torch.equal, a, b)):
            return False
    return True


def _layer_names(layout: Layout, layers: Sequence[Sequence[str]] | None) -> list[list[str]]:
    if layers is None:
        return [list(layout.slots)]
    seen: set[str] = set()
    for names in layers:
        if missing := [n for n in names if n not in layout.slots]:
            raise KeyError(f"no such parameters: {sorted(missing)[:6]}")
        if twice := [n for n in names if n in seen]:
            raise ValueError(f"in two layers: {sorted(twice)[:6]}")
        seen.update(names)
    return [list(names) for names in layers]
