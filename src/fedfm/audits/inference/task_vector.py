"""What a task vector tau = theta - theta_bar tells: of which classes it was trained on, and how other clients that know
the weights' formula compute it.

Label counts from the last layer's update: Wainakh et al., User-Level Label Leakage from Gradients in Federated
Learning, PoPETs 2022, arXiv:2105.09369; here over many steps and solved for the shares of all classes together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
GRID = 2000  # places at which the one unknown is tried


def class_evidence(weight: Array, bias: Array | None, feature: Array | None = None) -> Array:
    """(C,): higher, the more the class's logit was pushed up; a class without rows is only pushed down.

    A step of cross-entropy changes a bias by eta (share of the class in the batch - mean predicted probability).

    Args:
        weight: (C, d), the head's rows in tau.
        bias: (C,), or None where the head has none.
        feature: (d,) a typical feature, along which the rows stand for a bias that is not there.
    """
    if bias is not None:
        return bias.astype(np.float64)
    if feature is None:
        raise ValueError("a head without a bias is read along a typical feature")
    found: Array = weight.astype(np.float64) @ feature.astype(np.float64)
    return found


def class_shares(bias: Array, steps: float, predicted: Array) -> Array:
    """(C,) shares of the classes among the rows, non-negative and summing to 1.

    A bias that has gone tau_c in steps of size eta obeys tau_c / (eta steps) = pi_c - sum_k pi_k Q_kc, where Q_kc is
    the mean probability of c that rows of class k were given on the way. Solved by non-negative least squares.

    Args:
        bias: (C,) of tau.
        steps: eta times the number of steps.
        predicted: ``Q`` (C, C), rows summing to 1.
    """
    from scipy.optimize import nnls

    classes = len(bias)
    equations = np.vstack([np.eye(classes) - predicted.T, np.full((1, classes), float(classes))])
    found, _ = nnls(equations, np.append(bias.astype(np.float64) / steps, float(classes)))
    total = found.sum()
    shares: Array = found / total if total > 0 else np.full(classes, 1 / classes)
    return shares


def overlap(a: Array, b: Array) -> float:
    """1 - total variation of two distributions: 1 where they are equal, 0 where they share nothing."""
    return float(np.minimum(a, b).sum())


def shown(change: Array, others: Array, p: Array, own: float) -> Array:
    """(P,) the victim's task vector where a client's row of weights is known: (Delta - sum_k p_k tau_k) / p_victim.

    Args:
        change: (P,) what the client's aggregate changed by, Delta.
        others: (M, P) task vectors of the colluders, the client's own among them.
        p: (M,) its weights of those.
        own: its weight of the victim, not 0.
    """
    found: Array = (change - p @ others) / own
    return found


def unshown(change: Array, others: Array, at: int, negative: str, temperature: float = 1.0) -> list[Array]:
    """The same where no weight is shown: the formula of the weights leaves one unknown, and gives one equation for it.

    Rows sum to 1 and g_ii is known, so that p_ik = a g_ik for all colluders k, p_iv = 1 - a sum_k g_ik, with one
    unknown a = 1/sum of row i. The victim's vector is then (Delta - a s)/p_iv with s = sum_k g_ik tau_k, and its cosine
    with tau_i has to be the one that p_iv = a g_iv says.

    Args:
        others: (M, P) task vectors of the colluders, not zero.
        at: which of them is client i, whose aggregate changed by ``change``.
        negative: what becomes of cosines: ``clip``, ``raw`` or ``softmax``.

    Returns:
        A vector (P,) for every a that is consistent; none where the victim has no weight in row i.
    """
    from scipy.optimize import brentq

    mine = others[at]
    norm = float(np.linalg.norm(mine))
    cosines = others @ mine / (np.linalg.norm(others, axis=1) * norm)
    g = weight(cosines, negative, temperature)
    s, total = g @ others, float(g.sum())
    # All inner products of mine, Delta and s: f below is a function of numbers.
    md, ms, dd, ds, ss = (float(x @ y) for x, y in ((mine, change), (mine, s), (change, change), (change, s), (s, s)))

    def f(a: float) -> float:
        own = 1 - a * total
        length = np.sqrt(max(dd - 2 * a * ds + a * a * ss, 0.0))
        cosine = np.sign(own) * (md - a * ms) / (norm * length) if length > 1e-9 * np.sqrt(dd) else 0.0
        return float(cosine - _cosine(own / a, negative, temperature))

    # Clipped weights are none below 0; raw sums are at least a tenth.
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
    """What a cosine weighs, before rows are normalised."""
    if negative == "softmax":
        return np.exp((cosine - 1) / temperature)
    return np.maximum(cosine, 0) if negative == "clip" else cosine


def _cosine(g: float, negative: str, temperature: float) -> float:
    """The cosine that a weight g says; NaN where none does."""
    if negative == "softmax":
        return float(1 + temperature * np.log(g)) if g > 0 else float("nan")
    return g
