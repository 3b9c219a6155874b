"""Mixtures without a component that sits on a single row, which would be a copy of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedfm.methods.fedpft.mixtures.em import Fit, fit
from fedfm.methods.fedpft.mixtures.mixture import Array, Mixture

ALONE = 2 - 0.005  # rows below which a component stands for one; EM's end leaves a little of two to others


def fit_without_singles(
    groups: Sequence[Array], components: Sequence[int], covariance: str, *, seeds: Sequence[int], **options: Any
) -> list[Fit]:
    """What :func:`~fedfm.methods.fedpft.mixtures.fit` finds, where components that end as one row's are dropped.

    ``capacity`` alone does not prevent them: an outlier draws a component to itself whatever K is. A component stands
    for n times its weight rows; those of less than two go, all but the heaviest, and EM goes on from the rows of the
    others, until there is none. Only a group of one row keeps a component of one.

    Args:
        groups, components, covariance, seeds: as of ``fit``; K is lowered further by what is dropped.
        options: the others of ``fit``.

    Raises:
        ValueError: as ``fit``.
    """
    fits = fit(groups, components, covariance, seeds=seeds, **options)
    while rest := {i: left for i, f in enumerate(fits) if (left := _shared(f.mixture, len(groups[i])))}:
        again = fit(
            [groups[i] for i in rest],
            [g.components for g in rest.values()],
            covariance,
            seeds=[seeds[i] for i in rest],
            **options | {"starts": [g.nearest(groups[i]) for i, g in rest.items()]},
        )
        for i, found in zip(rest, again, strict=True):
            fits[i] = found
    return fits


def _shared(g: Mixture, rows: int) -> Mixture | None:
    """The components that stand for several of the rows, and the heaviest; None where all of them do."""
    stay = rows * g.weights >= ALONE
    stay[g.weights.argmax()] = True
    return None if stay.all() else Mixture(g.weights[stay], g.means[stay], g.scales[stay])
