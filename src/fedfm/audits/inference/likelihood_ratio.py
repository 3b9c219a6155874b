"""Membership inference on a released density, by the likelihood ratio log g(x) - log g_shadow(x).

A training row of the released density g is more likely under g than under a shadow, a density fitted in the same way to
other rows of the same kind. Without a shadow, the attack would take typical rows for members.
Sankararaman, Obozinski, Jordan, Halperin: Genomic privacy and limits of individual detection in a pool. 2009; Carlini
et al.: Membership inference attacks from first principles. 2022. arXiv:2112.03570.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fedfm.audits.inference.rates import Array

_LARGE = 1e15  # replaces infinity, so that means and spreads of scores are finite


class Density(Protocol):
    """The released density, or the attacker's shadow."""

    def log_prob(self, x: Array) -> Array:
        """Log density at every row of (n, d): (n,)."""


def scores(x: Array, released: Density, shadow: Density) -> Array:
    """Scores (n,) of rows x (n, d); rows to which ``released`` was fitted have high scores."""
    with np.errstate(invalid="ignore"):  # both densities may be 0, and then there is no evidence
        ratio: Array = released.log_prob(x) - shadow.log_prob(x)
    return np.nan_to_num(ratio, nan=0.0, posinf=_LARGE, neginf=-_LARGE)
