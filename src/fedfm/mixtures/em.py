"""Expectation-maximisation for many groups of rows: one group is the features of one (client, class).

Every group is fitted alone, from its own seed, so that its mixture does not depend on the other groups nor on how many
of them are fitted at once. One component has a closed form; several run in ``kernel`` (spherical, diag) or through
BLAS in ``full``.

An M step adds the floor, 1e-6 times the group's mean variance plus 1e-12, to every variance (full: to the diagonal),
as scikit-learn's ``reg_covar`` does. Where variances are as small as the floor that is not the maximiser, and the
likelihood could fall; such a step is undone and ends the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from fedfm.mixtures import full
from fedfm.mixtures.mixture import COVARIANCES, Array, Mixture

ROWS_A_COMPONENT = 10
FLOOR, FLOOR_ALWAYS = 1e-6, 1e-12
LLOYD = 3  # iterations of k-means after k-means++
LARGEST = 1e15  # squares and their sums stay far inside float32


@dataclass(frozen=True)
class Fit:
    """One group's mixture and how it was reached.

    Attributes:
        mixture: after the last M step.
        log_likelihood: mean over the rows, of the last E step, which the last M step followed; with one component, of
            the mixture itself.
        iterations: E steps.
        converged: the last one changed the log-likelihood by less than the tolerance.
    """

    mixture: Mixture
    log_likelihood: float
    iterations: int
    converged: bool


def capacity(n: int, components: int) -> int:
    """K that ``n`` examples can carry: ten for each component, and at least one component.

    Example:
        >>> capacity(1000, 10), capacity(35, 10), capacity(4, 10)
        (10, 3, 1)
    """
    return max(1, min(components, n // ROWS_A_COMPONENT))


def fit(
    groups: Sequence[Array],
    components: Sequence[int],
    covariance: str,
    *,
    seeds: Sequence[int],
    max_iter: int = 100,
    tol: float = 1e-3,
    starts: Sequence[Array] | None = None,
    workers: int = 1,
) -> list[Fit]:
    """One mixture for every group, by EM from k-means++ and a few iterations of k-means.

    The first use compiles for some seconds; what it compiled is kept beside the sources or in the user's cache.

    Args:
        groups: features (n, d), n >= 1, of one d; float16, float32 or float64, computed in float32 about the group's
            mean. They are not written to.
        components: K of each group; lowered to n, and to the number of components that a start leaves rows.
        covariance: ``"spherical"``, ``"diag"`` or ``"full"``.
        seeds: one for each group; two groups of equal rows and seeds have equal mixtures.
        max_iter: E steps at most.
        tol: stop when the mean log-likelihood of a row changes by less.
        starts: labels (n,) in 0...K-1 of each group, instead of k-means++.
        workers: threads. The mixtures are the same, bit for bit.

    Raises:
        ValueError: shapes, lengths or values that make no sense, with the group's index; NaN, infinity or numbers
            beyond 1e15 among the features.
    """
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance = {covariance!r}: expected one of {', '.join(COVARIANCES)}")
    for name, many in (("components", components), ("seeds", seeds), ("starts", groups if starts is None else starts)):
        if len(many) != len(groups):
            raise ValueError(f"{len(groups)} groups, but {len(many)} {name}")
    if max_iter < 1 or not tol >= 0 or workers < 1:
        raise ValueError(f"max_iter = {max_iter}, tol = {tol}, workers = {workers}: expected >= 1, >= 0, >= 1")
    for i, (group, k) in enumerate(zip(groups, components, strict=True)):
        _refuse(i, group, k, groups[0], None if starts is None else starts[i])

    def one(i: int) -> Fit:
        start = None if starts is None else starts[i]
        return _fit(i, groups[i], components[i], covariance, seeds[i], max_iter, tol, start)

    with full.one_thread() if covariance == "full" else nullcontext():
        if workers == 1 or len(groups) < 2:
            return [one(i) for i in range(len(groups))]
        order = sorted(range(len(groups)), key=lambda i: -len(groups[i]) * components[i])
        lots = min(len(order), 8 * workers)  # of long and short groups each
        with ThreadPoolExecutor(workers) as pool:
            done = list(pool.map(lambda lot: [(i, one(i)) for i in order[lot::lots]], range(lots)))
    found = dict(pair for lot in done for pair in lot)
    return [found[i] for i in range(len(groups))]


def _refuse(i: int, group: Array, k: int, first: Array, start: Array | None) -> None:
    if group.ndim != 2 or not group.size or group.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"group {i} has shape {group.shape}, expected (n >= 1, {first.shape[-1] if first.ndim else 0})"
        )
    if group.dtype.kind != "f":
        raise ValueError(f"group {i} is {group.dtype}, expected floats")
    if k < 1:
        raise ValueError(f"group {i}: {k} components, expected at least 1")
    if start is not None and (start.shape != (len(group),) or start.dtype.kind not in "iu"):
        raise ValueError(f"starts of group {i}: {start.dtype} {start.shape}, expected integers ({len(group)},)")
    if start is not None and k > 1 and not (start.min() >= 0 and start.max() < k):
        raise ValueError(f"starts of group {i} run from {start.min()} to {start.max()}, expected 0 to {k - 1}")


def _fit(
    i: int, group: Array, k: int, covariance: str, seed: int, max_iter: int, tol: float, start: Array | None
) -> Fit:
    """One group, in float32 about its mean."""
    from fedfm.compiled import aligned
    from fedfm.mixtures import kmeans
    from fedfm.mixtures.moments import moments

    n, d = group.shape
    k = min(k, n)
    if group.dtype != np.float32:
        with np.errstate(over="ignore"):  # to infinity, which is refused
            group = group.astype(np.float32)
    x = np.ascontiguousarray(group).view()  # (n, d)
    x.flags.writeable = False  # of one type, whatever it was: compiled once
    middle, variances = np.empty(d), np.empty(d)
    if not moments(x, middle, variances, LARGEST):
        raise ValueError(f"group {i} holds NaN, infinity or numbers beyond {LARGEST:g}")
    floor = FLOOR * float(variances.sum() / d) + FLOOR_ALWAYS
    if k > 1 or covariance == "full":
        x = np.subtract(x, middle.astype(np.float32), out=aligned(n, d))
    if k > 1:
        labels = kmeans.start(x, k, seed, LLOYD) if start is None else np.ascontiguousarray(start, np.int64)
        rows = np.bincount(labels)
        k = int(np.count_nonzero(rows))
        if k < len(rows):  # a component without rows is none
            labels = (np.cumsum(rows > 0) - 1)[labels]
    if covariance == "full":
        found = full.one(x, floor) if k == 1 else full.several(x, labels, k, floor, max_iter, tol)
    elif k == 1:
        found = _one(variances, covariance == "diag", floor)
    else:
        found = _several(x, labels, k, covariance == "diag", floor, max_iter, tol)
    weights, means, scales, ll, iterations, converged = found
    return Fit(Mixture(weights, (means + middle).astype(np.float32), scales), ll, iterations, converged)


def _one(variances: Array, diag: bool, floor: float) -> full.Found:
    """One component: mean and variances of the group are the maximum, and its log-likelihood needs no row."""
    d = len(variances)
    each = variances if diag else np.full(1, variances.sum() / d)
    v = each + floor
    ll = -0.5 * (float((np.log(v) + each / v).sum()) * (d // len(v)) + d * math.log(2 * math.pi))
    scales = np.sqrt(v).astype(np.float32)
    return np.ones(1), np.zeros((1, d), np.float32), scales[None] if diag else scales, ll, 1, True


def _several(x: Array, labels: Array, k: int, diag: bool, floor: float, max_iter: int, tol: float) -> full.Found:
    """K components at centred rows (n, d) from labels that each have a row; spherical or diagonal covariances."""
    from fedfm.compiled import aligned
    from fedfm.mixtures import kernel

    weights, work = np.empty(k), aligned(7, k, x.shape[1])
    work[:] = 0
    iterations, converged, ll = kernel.em(x, labels, diag, floor, tol, max_iter, weights, work)
    return weights, work[0], np.sqrt(work[1] if diag else work[1, :, 0]), ll, iterations, converged
