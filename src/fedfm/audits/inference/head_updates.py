"""Compute labels and features of rows from the change of a linear head that they caused.

For a row with features x, predicted probabilities p and one-hot label y, the gradient of the cross-entropy is
(p - y) x^T for the weights W (C, d), and p - y for the bias b (C,). So a row of class c raises b_c and lowers all other
entries of b (Wainakh et al., User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022,
arXiv:2105.09369).
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

RIDGE = 1.0  # ridge penalty, for standardised traces
ALPHAS = (0.1, 0.3, 1.0, 5.0)  # parameters of the Dirichlet distributions of the attacker's guesses


def class_means(x: Array, labels: Array, classes: int) -> Array:
    """The mean row (C + 1, d) of each class, and of all rows (m, d), which is that of an empty class, too."""
    mean = x.mean(0)
    return np.stack([*(x[labels == c].mean(0) if (labels == c).any() else mean for c in range(classes)), mean])


def traces(weight: Array, bias: Array | None, means: Array, labels: Array, probabilities: Array) -> Array:
    """Statistics of a head's update that depend on label counts: (5 C,), or (4 C,) for a head without a bias.

    Without a bias, W m takes its place, where m is the mean of the attacker's rows. A row with features z changes W m
    by (y - p) z . m. So W m counts labels if z . m is positive, which it is if rows have a common part. Otherwise z . m
    is noise. The attacker's own updates have this noise, too, so :func:`label_shares` accounts for it.

    Args:
        weight, bias: (C, d), (C,): changes of the head; ``bias`` is None if the head has none.
        means: (C + 1, d): the :func:`class_means` of the attacker's own rows, as the head sees them.
        labels: (m,): their classes.
        probabilities: (m, C): predictions for these rows by the updated model.
    """
    classes = len(weight)
    right = np.array([probabilities[labels == c, c].mean() if (labels == c).any() else 0.0 for c in range(classes)])
    shift = () if bias is None else (bias,)
    moved = weight @ means[-1] + (0.0 if bias is None else bias)
    return np.concatenate([*shift, moved, (weight * means[:-1]).sum(1), probabilities.mean(0), right])


def guesses(classes: int, n: int, number: int, rng: np.random.Generator) -> Array:
    """Random label counts (number, C) of n rows for the attacker to try, from a single class to equal counts."""
    shares = [rng.dirichlet(np.full(classes, ALPHAS[i % len(ALPHAS)])) for i in range(number)]
    return np.stack([rng.multinomial(n, p) for p in shares])


def label_shares(tried: Array, shares: Array, observed: Array) -> Array:
    """Fractions of the classes (C,) behind an update, by ridge regression on updates that the attacker made itself.

    Melis, Song, De Cristofaro, Shmatikov. Exploiting Unintended Feature Leakage in Collaborative Learning. IEEE S&P
    2019. arXiv:1805.04049, Section 4.3: the attacker trains on rows of its own with and without a property.

    Args:
        tried: (M, k): traces of the attacker's own updates.
        shares: (M, C): fractions of the labels behind these updates.
        observed: (k,): traces of the update under attack.
    """
    middle, spread = tried.mean(0), tried.std(0) + 1e-12
    x, mean = (tried - middle) / spread, shares.mean(0)
    weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (shares - mean))  # (k, C)
    found = np.clip(mean + (observed - middle) / spread @ weights, 0.0, None)
    return np.asarray(found / found.sum()) if found.sum() > 0 else np.full(len(mean), 1 / len(mean))


def distance(a: Array, b: Array) -> float:
    """Total variation distance of two distributions, in [0, 1].

    Example:
        >>> distance(np.array([1.0, 0.0]), np.array([0.5, 0.5]))
        0.5
    """
    return float(np.abs(a - b).sum() / 2)


def features(weight: Array, bias: Array) -> tuple[Array, Array]:
    """For each class whose bias moved, X = dW_c / db_c: the classes (k,), and X (k, d).

    Phong, Aono, Hayashi, Wang, Moriai. Privacy-Preserving Deep Learning via Additively Homomorphic Encryption. IEEE
    TIFS 2018, ePrint 2017/715, Section 3. X is exact if a single row caused the change. If several rows caused it, X is
    their mean with weights p - y.

    Args:
        weight: (C, d) change of the weights.
        bias: (C,) change of the bias.

    Example:
        >>> x, push = np.array([3.0, 4.0]), np.array([0.5, -0.5])
        >>> features(np.outer(push, x), push)[1].tolist()
        [[3.0, 4.0], [3.0, 4.0]]
    """
    moved = np.flatnonzero(np.abs(bias) > 1e-6 * max(float(np.abs(bias).max(initial=0.0)), 1e-30))
    return moved, weight[moved].astype(np.float64) / bias[moved, None]
