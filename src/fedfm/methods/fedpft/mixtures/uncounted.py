"""Fit mixtures that do not reveal the number n of rows.

In an ordinary mixture a component's weight is close to a multiple of 1/n. The number of components depends on n if each
component needs ten rows. If rows lie on a grid, their mean lies on an n times finer grid. So here K takes two values,
and all numbers are rounded to grids that are the same for every n:

- K is the requested number if n is at least ten times that number, else 1. If a component would stand for a single row,
  another component is split instead. (Rows that are nearly all equal cannot be split that often, and get K = 1.)
- Weights are multiples of a power of two between 1/(8K) and 1/(4K). With ten rows for each component, every such
  weight can occur for every n.
- Standard deviations are rounded to eighths of an octave. Means are rounded to multiples of a step,
  which is between a sixteenth and an eighth of their standard deviation.

``fedfm show fedpft`` prints what this rounding cannot hide.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedfm.methods.fedpft.mixtures.em import capacity, fit
from fedfm.methods.fedpft.mixtures.mixture import Array, Mixture
from fedfm.methods.fedpft.mixtures.singles import fit_without_singles

OCTAVE = 8  # number of values for standard deviations between two powers of two
PARTS = 8  # a mean's step is the power of two just below its standard deviation, divided by this


def fit_uncounted(groups: Sequence[Array], components: int, covariance: str, *, seeds: Sequence[int]) -> list[Mixture]:
    """Fit a mixture to every group, with one or ``components`` components, and round it to grids independent of n.

    Args:
        groups, seeds: as for :func:`~fedfm.methods.fedpft.mixtures.fit`.
        components: K of the groups that have at least ten rows for each of K components.
        covariance: ``"spherical"`` or ``"diag"``.

    Raises:
        ValueError: as ``fit``; also for a full covariance, whose rank reveals a small number of rows.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(60, 3))
        >>> [g.components for g in fit_uncounted([x, x[:49]], 5, "diag", seeds=[0, 1])]
        [5, 1]
    """
    if covariance == "full":
        raise ValueError('covariance = "full": its rank reveals the number of rows; expected "spherical" or "diag"')
    k = [components if capacity(len(x), components) == components else 1 for x in groups]
    fits = fit_without_singles(groups, k, covariance, seeds=seeds)
    return [
        round_to_grid(_whole(f.mixture, x, many, seed, covariance))
        for f, x, many, seed in zip(fits, groups, k, seeds, strict=True)
    ]


def round_to_grid(g: Mixture) -> Mixture:
    """Round a spherical or diagonal mixture to the grids of this module."""
    scales = np.exp2(np.round(np.log2(g.scales.astype(np.float64)) * OCTAVE) / OCTAVE)
    step = np.exp2(np.floor(np.log2(scales)) - np.log2(PARTS)).reshape(g.components, -1)  # (K, 1) or (K, d)
    means = np.round(g.means / step) * step
    return Mixture(_weights(g.weights), means.astype(np.float32), scales.astype(np.float32))


def _weights(weights: Array) -> Array:
    """The nearest multiples of the grid's step with sum 1, at least one step each, by the largest remainder."""
    k = len(weights)
    steps = 1 << (4 * k - 1).bit_length()
    exact = weights * steps
    units = np.maximum(np.floor(exact), 1)
    while units.sum() < steps:
        units[(exact - units).argmax()] += 1
    while units.sum() > steps:
        units[np.where(units > 1, exact - units, np.inf).argmin()] -= 1
    return np.asarray(units / steps)


def _whole(g: Mixture, x: Array, k: int, seed: int, covariance: str) -> Mixture:
    """Split components until there are ``k``, each of several rows; if that is impossible, fit one component."""
    while g.components < k:
        split = _split(g, x, seed, covariance)
        if split is None:
            return fit([x], [1], covariance, seeds=[seed])[0].mixture
        g = split
    return g


def _split(g: Mixture, x: Array, seed: int, covariance: str) -> Mixture | None:
    """Split the largest component that can be split; None if no component can be split."""
    of = g.nearest(x)
    for j in np.bincount(of, minlength=g.components).argsort(kind="stable")[::-1]:
        if (two := _two(x[of == j], seed, covariance)) is not None:
            rest = np.arange(g.components) != j
            return Mixture(
                np.concatenate([g.weights[rest], g.weights[j] * two.weights]),
                np.concatenate([g.means[rest], two.means]),
                np.concatenate([g.scales[rest], two.scales]),
            )
    return None


def _two(x: Array, seed: int, covariance: str) -> Mixture | None:
    """Fit two components of several rows each; rows that would be alone in one are left out. None if impossible."""
    while len(x) >= 4:
        (whole,) = fit_without_singles([x], [2], covariance, seeds=[seed])
        if whole.mixture.components == 2:
            return whole.mixture
        (apart,) = fit([x], [2], covariance, seeds=[seed])
        of = apart.mixture.nearest(x)
        most = x[of == np.bincount(of).argmax()]
        if len(most) == len(x):
            return None
        x = most
    return None
