"""Mixtures without components that stand for a single row and so would copy it."""

from __future__ import annotations

from collections.abc import Sequence

from fedfm.methods.fedpft.mixtures.em import Fit, fit
from fedfm.methods.fedpft.mixtures.mixture import Array, Mixture

ALONE = 2 - 0.005  # a component of fewer rows stands for one; at EM's end others have a small share of two rows


def fit_without_singles(
    groups: Sequence[Array], components: Sequence[int], covariance: str, *, seeds: Sequence[int]
) -> list[Fit]:
    """:func:`~fedfm.methods.fedpft.mixtures.fit`, then drop components that stand for one row.

    ``capacity`` alone does not prevent them: an outlier attracts a component for any K. A component stands for n times
    its weight rows; those of less than two are dropped, except the heaviest, and EM continues from the rows of the
    others, until none is left. Only a group of one row keeps a component of one.

    The arguments and errors are those of ``fit``.
    """
    fits = fit(groups, components, covariance, seeds=seeds)
    for i, x in enumerate(groups):
        while (rest := _several_rows(fits[i].mixture, len(x))) is not None:
            (fits[i],) = fit([x], [rest.components], covariance, seeds=[seeds[i]], starts=[rest.nearest(x)])
    return fits


def _several_rows(g: Mixture, rows: int) -> Mixture | None:
    """The components that stand for several rows, and the heaviest; None if these are all."""
    stay = rows * g.weights >= ALONE
    stay[g.weights.argmax()] = True
    return None if stay.all() else Mixture(g.weights[stay], g.means[stay], g.scales[stay])
