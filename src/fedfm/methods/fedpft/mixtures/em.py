"""Expectation-maximisation for many groups of rows; a group is one client's features of one class.

Every group is fitted by itself, from its own seed. So its mixture does not depend on other groups (see ``group``).

An M step adds a floor to every variance (if full, to the diagonal), like scikit-learn's ``reg_covar``. The floor is
1e-6 times the group's mean variance plus 1e-12. If variances are this small, such an M step does not maximise the
likelihood and may lower it. A step that lowers the likelihood is undone, and it ends the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from fedfm.linalg.threads import one_thread
from fedfm.methods.fedpft.mixtures.mixture import COVARIANCES, Array, Mixture

ROWS_A_COMPONENT = 10


@dataclass(frozen=True)
class Fit:
    """One group's mixture, and how its fit went.

    Attributes:
        mixture: the mixture after the last M step.
        log_likelihood: mean over the rows in the last E step, which precedes the last M step. NaN if there is one
            component, since its fit has a closed form.
        iterations: number of E steps.
        converged: whether the last step changed the log-likelihood by less than the tolerance.
    """

    mixture: Mixture
    log_likelihood: float
    iterations: int
    converged: bool


def capacity(n: int, components: int) -> int:
    """The number K of components for ``n`` examples: at least ten examples for each, and at least one component.

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
) -> list[Fit]:
    """Fit one mixture to every group: k-means++, a few iterations of k-means, then EM.

    The first call compiles the code, which takes some seconds. The compiled code is cached next to the sources or in
    the user's cache.

    Args:
        groups: features (n, d), n >= 1, equal d; float16, float32 or float64. The fit centres them at the group's
            mean and computes in float32.
        components: K of each group; lowered to n, and to the number of components that have rows at the start.
        seeds: one for each group; groups with equal rows and equal seeds get equal mixtures.
        max_iter: largest number of E steps.
        tol: stop when the mean log-likelihood of a row changes by less than this.
        starts: labels (n,) in 0...K-1 of each group, instead of k-means++.

    Raises:
        ValueError: invalid shapes, lengths or values; features that are NaN, infinite or beyond 1e15. The error names
            the group's index.
    """
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance = {covariance!r}: expected one of {', '.join(COVARIANCES)}")
    for name, many in (("components", components), ("seeds", seeds), ("starts", groups if starts is None else starts)):
        if len(many) != len(groups):
            raise ValueError(f"{len(groups)} groups, but {len(many)} {name}")
    if max_iter < 1 or not tol >= 0:
        raise ValueError(f"max_iter = {max_iter}, tol = {tol}: expected at least 1 and 0")
    for i, (group, k) in enumerate(zip(groups, components, strict=True)):
        _refuse(i, group, k, groups[0], None if starts is None else starts[i])

    from fedfm.methods.fedpft.mixtures.group import fit_one

    fits = []
    with one_thread() if covariance == "full" else nullcontext():
        for i, (group, k) in enumerate(zip(groups, components, strict=True)):
            start = None if starts is None else starts[i]
            try:
                found = fit_one(group, k, covariance, seeds[i], max_iter, tol, start)
            except OverflowError as error:
                raise ValueError(f"group {i} {error}") from None
            fits.append(Fit(Mixture(*found[:3]), *found[3:]))
    return fits


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
