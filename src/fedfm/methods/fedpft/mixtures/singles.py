"""Fit mixtures in which no component represents a single row, since such a component would copy that row."""

from __future__ import annotations

from collections.abc import Sequence

from fedfm.methods.fedpft.mixtures.em import Fit, fit
from fedfm.methods.fedpft.mixtures.mixture import Array, Mixture

# A component of fewer rows than this represents one row. EM divides each row among the
# components, so the shares of two rows in one component may add up to slightly less than 2.
ALONE = 2 - 0.005


def fit_without_singles(
    groups: Sequence[Array], components: Sequence[int], covariance: str, *, seeds: Sequence[int]
) -> list[Fit]:
    """Fit like :func:`~fedfm.methods.fedpft.mixtures.fit`, then drop components that represent one row.

    ``capacity`` alone does not prevent such components: an outlier attracts a component for any K. A component
    represents (n times its weight) rows. Components that represent less than two rows are dropped, except the heaviest
    one. EM continues from the remaining components, until none represents less than two rows. Only a group of one row
    keeps a component of one row.

    The arguments and errors are those of ``fit``.
    """
    fits = fit(groups, components, covariance, seeds=seeds)
    for i, x in enumerate(groups):
        while (rest := _several_rows(fits[i].mixture, len(x))) is not None:
            (fits[i],) = fit([x], [rest.components], covariance, seeds=[seeds[i]], starts=[rest.nearest(x)])
    return fits


def _several_rows(g: Mixture, rows: int) -> Mixture | None:
    """The mixture without components of a single row; the heaviest component always stays. None if all stay."""
    stay = rows * g.weights >= ALONE
    stay[g.weights.argmax()] = True
    return None if stay.all() else Mixture(g.weights[stay], g.means[stay], g.scales[stay])
