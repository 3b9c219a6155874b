"""Mixtures without components that stand for a single row and so would copy it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedfm.methods.fedpft.mixtures.em import Fit, fit
from fedfm.methods.fedpft.mixtures.mixture import Array, Mixture

ALONE = 2 - 0.005  # a component of fewer rows stands for one; at EM's end others have a small share of two rows


def fit_without_singles(
    groups: Sequence[Array], components: Sequence[int], covariance: str, *, seeds: Sequence[int], **options: Any
) -> list[Fit]:
    """:func:`~fedfm.methods.fedpft.mixtures.fit`, then drop components that stand for one row.

    ``capacity`` alone does not prevent them: an outlier attracts a component for any K. A component stands for n times
    its weight rows; those of less than two are dropped, except the heaviest, and EM continues from the rows of the
    others, until none is left. Only a group of one row keeps a component of one.

    The arguments and errors are those of ``fit``.
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
    """The components that stand for several rows, and the heaviest; None if these are all."""
    stay = rows * g.weights >= ALONE
    stay[g.weights.argmax()] = True
    return None if stay.all() else Mixture(g.weights[stay], g.means[stay], g.scales[stay])
