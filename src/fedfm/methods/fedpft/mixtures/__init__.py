"""Gaussian mixtures of features, equation (2) of FedPFT (Beitollahi et al. 2024, arXiv:2402.01862): fit and sample.

Example:
    >>> import numpy as np
    >>> from fedfm.methods.fedpft.mixtures import capacity, fit
    >>> x = np.random.default_rng(0).normal(size=(60, 3))
    >>> (found,) = fit([x], [capacity(60, 10)], "diag", seeds=[0])
    >>> found.mixture.components, found.mixture.sample(5, np.random.default_rng(1)).shape
    (6, (5, 3))
"""

from fedfm.methods.fedpft.mixtures.em import Fit, capacity, fit
from fedfm.methods.fedpft.mixtures.mixture import COVARIANCES, Mixture
from fedfm.methods.fedpft.mixtures.singles import fit_without_singles
from fedfm.methods.fedpft.mixtures.uncounted import fit_uncounted

__all__ = ["COVARIANCES", "Fit", "Mixture", "capacity", "fit", "fit_uncounted", "fit_without_singles"]
