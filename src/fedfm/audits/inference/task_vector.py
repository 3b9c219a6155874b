"""Two attacks on a task vector tau = theta - theta_bar.

The first computes the fractions of a client's labels from its tau. Wainakh et al. compute label counts from the last
layer's update (User-Level Label Leakage from Gradients in Federated Learning, PoPETs 2022, arXiv:2105.09369). Here the
update is over many steps, and the fractions of all classes are computed together.

Other clients carry out the second. They compute tau itself, because they know the formula of FedBip's weights.
"""

from __future__ import annotations

import numpy as np

from fedfm.audits.inference.rates import Array

GRID = 2000  # number of values that are tried for the unknown a


def class_evidence(weight: Array, bias: Array | None, feature: Array | None = None) -> Array:
    """(C,): change of each class's logit. Training can only lower the logit of a class that has no rows.

    A step of cross-entropy changes a bias by eta (fraction of the class in the batch - mean predicted probability).

    Args:
        weight, bias: (C, d) and (C,): the head's entries of tau; bias is None if the head has no bias.
        feature: (d,): a typical feature vector; without a bias, the change of this vector's logits replaces the bias.

    Raises:
        ValueError: neither a bias nor a feature is given.
    """
    if bias is not None:
        return bias.astype(np.float64)
    if feature is None:
        raise ValueError("a head without a bias needs a typical feature")
    return np.asarray(weight.astype(np.float64) @ feature.astype(np.float64))


def class_shares(bias: Array, steps: float, predicted: Array) -> Array:
    """(C,): fractions pi of the classes among the rows; non-negative, with sum 1.

    A bias that moved by tau_c in s steps of size eta satisfies tau_c / (eta s) = pi_c - sum_k pi_k Q_kc, where Q_kc is
    the mean predicted probability of c for rows of class k during training. Non-negative least squares solves this.

    Args:
        bias: (C,): the entries of tau for the head's bias.
        steps: eta s, the step size times the number of steps.
        predicted: ``Q`` (C, C), whose rows sum to 1.
    """
    from scipy.optimize import nnls

    classes = len(bias)
    equations = np.vstack([np.eye(classes) - predicted.T, np.full((1, classes), float(classes))])
    found, _ = nnls(equations, np.append(bias.astype(np.float64) / steps, float(classes)))
    total = found.sum()
    return np.asarray(found / total if total > 0 else np.full(classes, 1 / classes))


def overlap(a: Array, b: Array) -> float:
    """1 minus the total variation distance of two distributions: 1 if they are equal, 0 if they are disjoint."""
    return float(np.minimum(a, b).sum())


def solve_victim(change: Array, others: Array, p: Array, own: float) -> Array:
    """(P,): the victim's task vector from a client's known weights: (Delta - sum_k p_k tau_k) / p_victim.

    Args:
        change: Delta (P,), the change of the client's aggregate.
        others: (M, P), the task vectors tau_k of the client and the other colluders.
        p: (M,), the client's weights of these vectors.
        own: p_victim, the client's weight of the victim, not 0.
    """
    return np.asarray((change - p @ others) / own)


def vectors_without_weights(
    change: Array, others: Array, at: int, negative: str, temperature: float = 1.0
) -> list[Array]:
    """The victim's task vector without known weights. The weights' formula leaves one unknown, and gives one equation.

    The weights are p_ik = a g_ik, where g_ik depends on the cosine of tau_i and tau_k, and a makes the row sum to 1.
    The colluders know g_ik for themselves, so a is the only unknown: p_iv = 1 - a sum_k g_ik for the victim v. The
    victim's vector is (Delta - a s) / p_iv with s = sum_k g_ik tau_k. The cosine of this vector with tau_i must be the
    cosine that gives the weight p_iv = a g_iv. This is the equation for a.

    Args:
        others: (M, P) task vectors of the colluders, not zero.
        at: index of client i, whose aggregate changes by ``change``.
        negative: the value of FedBip's key ``negative``: ``clip``, ``raw`` or ``softmax``.

    Returns:
        A vector (P,) for each a that satisfies the equation; an empty list if the victim has no weight in row i.
    """
    from scipy.optimize import brentq

    mine = others[at]
    norm = float(np.linalg.norm(mine))
    cosines = others @ mine / (np.linalg.norm(others, axis=1) * norm)
    g = weight(cosines, negative, temperature)
    s, total = g @ others, float(g.sum())
    # Compute all inner products of mine, Delta and s, so that f below needs no vectors.
    md, ms, dd, ds, ss = (float(x @ y) for x, y in ((mine, change), (mine, s), (change, change), (change, s), (s, s)))

    def f(a: float) -> float:
        own = 1 - a * total
        length = np.sqrt(max(dd - 2 * a * ds + a * a * ss, 0.0))
        cosine = np.sign(own) * (md - a * ms) / (norm * length) if length > 1e-9 * np.sqrt(dd) else 0.0
        return float(cosine - _cosine(own / a, negative, temperature))

    # Clipped and softmax weights are not negative, and sums of raw similarities are at least 0.1.
    ends = (1e-3 / total, (1 - 1e-6) / total) if negative != "raw" else (1e-3, 10.0)
    places = np.linspace(*ends, GRID)
    places = places[np.abs(1 - places * total) > 1e-9]
    values = np.array([f(a) for a in places])
    found = []
    for left, right, x, y in zip(places, places[1:], values, values[1:], strict=False):
        if np.isfinite(x) and np.isfinite(y) and x * y <= 0 and (1 - left * total) * (1 - right * total) > 0:
            a = brentq(f, left, right, xtol=1e-15, rtol=8.9e-16) if x * y else left if not x else right
            found.append((change - a * s) / (1 - a * total))
    return found


def weight(cosine: Array, negative: str, temperature: float) -> Array:
    """g: the weight that a cosine gives, before rows are normalised."""
    if negative == "softmax":
        return np.exp((cosine - 1) / temperature)
    return np.maximum(cosine, 0) if negative == "clip" else cosine


def _cosine(g: float, negative: str, temperature: float) -> float:
    """The cosine that gives the weight g; NaN if there is none."""
    if negative == "softmax":
        return float(1 + temperature * np.log(g)) if g > 0 else float("nan")
    return g
