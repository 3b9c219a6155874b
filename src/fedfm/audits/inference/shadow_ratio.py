"""Membership inference by likelihood ratio, with shadow models.

Carlini, Chien, Nasr, Song, Terzis, Tramer. Membership Inference Attacks From First Principles. IEEE S&P 2022.
arXiv:2112.03570, Algorithm 1. All rows share one variance, as Section VI.C advises for few shadow models.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

SOFT = 1.0  # pseudo-count: a row's mean is computed as if one more shadow had the mean of all rows


def confidence(logits: Array, labels: Array) -> Array:
    """Phi = log(p_y / (1 - p_y)) of each row, (n,).

    Over many trainings, phi is nearly normally distributed, while p_y is not (Section IV.C).

    Args:
        logits: (n, C), C at least 2.
        labels: (n,).

    Example:
        >>> confidence(np.array([[2.0, 1.0, 1.0]]), np.array([0])).round(3).tolist()
        [0.307]
    """
    x = np.asarray(logits, dtype=np.float64)
    rows = np.arange(len(x))
    others = x.copy()
    others[rows, labels] = -np.inf
    most = others.max(1)
    return np.asarray(x[rows, labels] - most - np.log(np.exp(others - most[:, None]).sum(1)))


def log_ratio(target: Array, shadows: Array, inside: Array) -> Array:
    """Log N(phi | mu_in, s_in^2) - log N(phi | mu_out, s_out^2) of each row, (n,).

    All ratios are 0 if no shadow was trained on any of the rows, or if each shadow was trained on all of them.

    Args:
        target: (n,): phi of the attacked model.
        shadows: (S, n): phi of the shadow models.
        inside: (S, n): whether the shadow was trained on the row.
    """
    found = []
    for there in (inside, ~inside):
        count = there.sum(0)  # (n,)
        if not count.any():
            return np.zeros(len(target))
        overall = float(shadows[there].mean())
        mean = (np.where(there, shadows, 0.0).sum(0) + SOFT * overall) / (count + SOFT)
        squares = np.where(there, (shadows - mean) ** 2, 0.0).sum()
        freedom = max(there.sum() - (count > 0).sum(), 1)
        spread = max(float(squares / freedom), 1e-12)
        found.append(-((target - mean) ** 2) / (2 * spread) - 0.5 * np.log(spread))
    return np.asarray(found[0] - found[1])
