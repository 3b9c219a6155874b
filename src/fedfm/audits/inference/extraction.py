"""Estimators of a foundation model that the server mixes into the models that it sends.

FedBaF sends w_{t+1} = (w' + a_t w_pre) / (1 + a_t) with a secret a_t. Let u_t = w', v_t = w_{t+1} and d_t = v_t - u_t.
Then w_pre lies on the line u_t + c_t d_t, at c_t = 1 + 1/a_t. So T rounds give T P equations for w_pre with only T more
unknown scalars. The range of a_t is known: alpha_t = (psi / tau_ref) U(1, 2), and tau_t follows from w', so
l_t <= a_t <= 2 l_t with l_t = psi tau_t / tau_ref.

A model is a vector (P,) of any floating type, and a sequence of models is (T, P). Sums are in float64. ``groups`` are
slices of the P entries, one for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedfm.audits.inference.rates import Array

Groups = Sequence[slice]
WORST = 1e12  # above this condition number of the normal equations, lines count as parallel
STILL = 1e-6  # below this fraction of |v|, |d| is a rounding error, and nothing was mixed in
SHORT, LONG = 0.8, 2.4  # range of a_t / l_t in the alternating estimator; wider than [1, 2], since l_t is an estimate
SWEEPS = 200
TURN = 1.3  # an active client aims at w' = -(TURN - 1) w_t
GRID = 65  # points of a numerical integral over an interval
BLOCK = 1 << 16  # number of coordinates that are computed at a time


class NoIntersectionError(ValueError):
    """The lines do not determine a point: there are fewer than two, or all are parallel."""


def intersection(u: Array, v: Array, groups: Groups | None = None) -> Array:
    """The point nearest to T lines u_t + c_t (v_t - u_t), in closed form.

    Solve G c = r with G_ij = <d_i, d_j> (1[i = j] - 1/T) and r_i = -<d_i, u_i - mean u>; then x = mean_t (u_t +
    c_t d_t). If a round mixes only some groups, a group uses only the rounds in which it moved; T is their number.

    Args:
        u: (T, P), models before mixing.
        v: (T, P), models after mixing.
        groups: slices, each of which a round mixes completely or not at all; None means that all entries are one group.

    Raises:
        NoIntersectionError: there are fewer than two lines, or all are parallel (condition of G above 1e12).

    Example:
        >>> import numpy as np
        >>> u = np.array([[3.0, 4.0], [4.0, 3.0]])
        >>> v = np.array([[0.0, 5.0], [1.0, 30 / 7]])
        >>> intersection(u, v).round(6).tolist()
        [-3.0, 6.0]
    """
    rounds, groups = len(u), groups or [slice(None)]
    gram, right, moved = np.zeros((rounds, rounds)), np.zeros(rounds), set[int]()
    for g in groups:
        a, d, on = _lines(u, v, g)
        moved.update(on.tolist())
        if len(on) > 1:
            gram[np.ix_(on, on)] += (d @ d.T) * (np.eye(len(on)) - 1 / len(on))
            right[on] -= ((a - a.mean(0)) * d).sum(1)
    used = np.flatnonzero(gram.diagonal())
    every = np.full(rounds, np.nan)
    every[used] = _solve(gram[np.ix_(used, used)], right[used], len(moved))
    x = np.empty(u.shape[1])
    for g in groups:
        x[g] = _on_lines(u, v, g, every)
    return x


def tensorwise(u: Array, v: Array, groups: Groups, low: Array, high: Array) -> tuple[Array, int]:
    """Like :func:`intersection`, but each group has scalars c_t of its own, in [low_t, high_t].

    The lines of some groups do not determine a point, e.g. the lines of a tensor with one entry, or a single line. For
    such a group, c is the harmonic mean of its range, and x the mean over the lines.

    Args:
        low, high: (T,), the range of c_t.

    Returns:
        (the estimate (P,), the number of groups whose lines determine a point).
    """
    x, met = np.empty(u.shape[1]), 0
    for g in groups:
        a, d, on = _lines(u, v, g)
        c = np.full(len(u), np.nan)
        c[on] = harmonic(low[on], high[on])
        try:
            gram = (d @ d.T) * (np.eye(len(on)) - 1 / max(len(on), 1))
            right = -((a - a.mean(0)) * d).sum(1) if len(on) else np.zeros(0)
            free = _solve(gram, right, len(on))
            c[on] = _solve_in_box(gram, right, free, low[on], high[on])
            met += 1
        except NoIntersectionError:
            pass
        x[g] = _on_lines(u, v, g, c)
    return x, met


def coordinatewise(u: Array, v: Array, low: Array, high: Array, prior: Literal["uniform", "log"] = "uniform") -> Array:
    """Estimate w_pre if each coordinate has an a_t of its own.

    A coordinate x of w_pre lies in the intersection of the T intervals u_t + [low_t, high_t] d_t. The estimate is the
    mean of x over this intersection. Because a_t = d_t / (x - v_t), the density of x is prod_t |x - v_t|^-2 if a_t is
    uniform, and prod_t |x - v_t|^-1 if a_t is log-uniform.

    Args:
        low, high: (T,), the range of c_t.
        prior: distribution of a_t within its range.
    """
    x = np.empty(u.shape[1])
    power = 2.0 if prior == "uniform" else 1.0
    s = np.linspace(0.0, 1.0, GRID)[:, None]
    for start in range(0, u.shape[1], BLOCK):
        g = slice(start, start + BLOCK)
        a, b = u[:, g].astype(np.float64), v[:, g].astype(np.float64)
        d = b - a
        ends = np.stack([a + low[:, None] * d, a + high[:, None] * d])  # (2, T, p)
        still = np.abs(d) <= STILL * np.abs(b)  # a coordinate that was not mixed gives no information about x
        least = np.where(still, -np.inf, ends.min(0)).max(0)
        most = np.where(still, np.inf, ends.max(0)).min(0)
        known = np.isfinite(least)
        middle = b.mean(0)
        least, most = np.where(known, least, middle), np.where(known, most, middle)
        least, most = np.minimum(least, most), np.maximum(least, most)  # rounding may swap them
        sign = np.where(d.sum(0) >= 0, 1.0, -1.0)  # x lies beyond v, and the end near v is more likely
        near, far = np.where(sign > 0, least, most), np.where(sign > 0, most, least)
        logs = np.zeros((GRID, x[g].size))
        points = near + (far - near) * s**2  # denser at the near end
        for t in range(len(u)):
            distance = np.abs(points - b[t]) + 1e-300
            logs -= np.where(still[t], 0.0, power * np.log(distance))
        weights = np.exp(logs - logs.max(0)) * np.maximum(s, 0.5 / GRID)
        x[g] = (weights * points).sum(0) / weights.sum(0)
    return x


def harmonic(low: Array | float, high: Array | float) -> Any:
    """The c in low..high whose largest relative error is smallest; this error is (high - low) / (high + low)."""
    return 2 * low * high / (low + high)


def place(least: Array | float, most: Array | float) -> tuple[Any, Any]:
    """The range (low, high) of c = 1 + 1/a, given the range of a."""
    return 1 + 1 / most, 1 + 1 / least


def one_round(u: Array, v: Array, low: float, high: float) -> Array:
    """Estimate w_pre from one round: the point u + c (v - u), where c is the harmonic mean of its range.

    The error is at most |w_pre - u| (high - low) / (high + low).

    Example:
        >>> import numpy as np
        >>> (7 * one_round(np.array([3.0, 4.0]), np.array([0.0, 5.0]), 1.5, 2.0)).round(6).tolist()
        [-15.0, 40.0]
    """
    u, v = u.astype(np.float64), v.astype(np.float64)
    return np.asarray(u + harmonic(low, high) * (v - u))


def alternating(u: Array, v: Array, guess: Array) -> Array:
    """Alternating estimate of a_t and w_pre by a part of the cohort; this part's mean u_t takes the place of w'.

    E_t = v_t - u_t; start with a = 1.5 l; repeat: p = sum_t a_t (E_t + a_t v_t) / sum_t a_t^2;
    a_t = clip(<E_t, p - v_t> / |p - v_t|^2, 0.8 l_t, 2.4 l_t).

    Args:
        guess: (T,), l_t from the coalition's own means; rounds with l_t = 0 are not used.

    Raises:
        NoIntersectionError: no round has a guess above 0.
    """
    used = np.flatnonzero(guess > 0)
    if not len(used):
        raise NoIntersectionError("in no round was anything mixed in")
    l = guess[used]  # noqa: E741 - the symbol of the specification
    n = len(used)
    # p is a linear combination of the E_t and v_t, so the iterations need only their inner products.
    inner = np.zeros((2 * n, 2 * n))
    for start in range(0, u.shape[1], BLOCK):
        z = _from_middle(u[used, start : start + BLOCK], v[used, start : start + BLOCK])
        inner += z @ z.T
    a = 1.5 * l
    weights = np.zeros(2 * n)
    for _ in range(SWEEPS):
        weights = np.concatenate([a, a * a]) / (a * a).sum()  # weights of E, then of v
        away = weights[None, :] - np.eye(2 * n)[n:]  # p - v_t in terms of E and v; weights of v sum to 1
        top = (inner[:n] * away).sum(1)
        bottom = np.einsum("ti,ij,tj->t", away, inner, away)
        new = np.clip(np.divide(top, bottom, out=np.array(a), where=bottom > 0), SHORT * l, LONG * l)
        done = bool(np.abs(new - a).max() <= 1e-13 * a.max())
        a = new
        if done:
            break
    x = np.empty(u.shape[1])
    for start in range(0, u.shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        x[part] = (weights[:n] + weights[n:]) @ v[used, part].astype(np.float64)  # E = v - u
        x[part] -= weights[:n] @ u[used, part].astype(np.float64)
    return x


def turned_around(w: Array, share: float) -> Array:
    """The vector that an active client with the fraction p of the weight sends in place of w_t: -((1.3 - p) / p) w_t.

    The others stay near w_t, so w' is near -0.3 w_t. That is the opposite direction, which makes tau_t and a_t as large
    as possible.

    Raises:
        ValueError: share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share {share}: expected a number in (0, 1]")
    return np.asarray(-(TURN - share) / share * w)


def relative_error(x: Array, truth: Array) -> float:
    """|x - w_pre| / |w_pre|, Euclidean. If w_pre = 0, the error is infinite, or 0 if x is 0, too."""
    off, norm = float(np.linalg.norm(x.astype(np.float64) - truth)), float(np.linalg.norm(truth.astype(np.float64)))
    return off / norm if norm else (np.inf if off else 0.0)


def dist(w: Array, truth: Array) -> float:
    """Appendix G's Dist: the mean of |w - w_pre| / |w| over coordinates with w != 0. Small |w| dominate the mean."""
    w = w.astype(np.float64)
    on = w != 0
    return float((np.abs(w - truth)[on] / np.abs(w[on])).mean()) if on.any() else np.nan


def _lines(u: Array, v: Array, g: slice) -> tuple[Array, Array, Array]:
    """u, d and the rounds of a group, restricted to the rounds in which the group moved."""
    a, b = u[:, g].astype(np.float64), v[:, g].astype(np.float64)
    d = b - a
    on = np.flatnonzero(np.linalg.norm(d, axis=1) > STILL * np.linalg.norm(b, axis=1))
    return a[on], d[on], on


def _on_lines(u: Array, v: Array, g: slice, c: Array) -> Array:
    """Mean of u + c d over the rounds in which a group moved and c is known; the mean of v if there are none."""
    a, d, on = _lines(u, v, g)
    known = np.isfinite(c[on])
    if known.any():
        return np.asarray((a[known] + c[on][known, None] * d[known]).mean(0))
    return np.asarray(v[:, g].astype(np.float64).mean(0))


def _solve(gram: Array, right: Array, lines: int) -> Array:
    if len(gram) < 2:
        raise NoIntersectionError(f"{lines} line{'' if lines == 1 else 's'}; at least two are needed")
    condition = float(np.linalg.cond(gram))
    if not condition <= WORST:  # also true for NaN
        raise NoIntersectionError(
            f"the lines are parallel: the condition of their equations is {condition:.1e}, above {WORST:.0e}"
        )
    return np.asarray(np.linalg.solve(gram, right))


def _solve_in_box(gram: Array, right: Array, start: Array, low: Array, high: Array) -> Array:
    """The c in [low, high] that minimises c' G c / 2 - r' c, by coordinate descent."""
    if ((low <= start) & (start <= high)).all():
        return start
    c = np.clip(start, low, high)
    for _ in range(1000):
        before = c.copy()
        for i in range(len(c)):
            c[i] = np.clip(c[i] + (right[i] - gram[i] @ c) / gram[i, i], low[i], high[i])
        if np.abs(c - before).max() <= 1e-12 * np.abs(c).max():
            break
    return c


def _from_middle(u: Array, v: Array) -> Array:
    """(2 T, p) float64: E_t, then v_t minus the mean of all v_t, since a large common part would cost digits in
    sums.
    """
    z = np.empty((2 * len(u), u.shape[1]))
    z[: len(u)] = v
    z[len(u) :] = z[: len(u)] - z[: len(u)].mean(0)
    z[: len(u)] -= u
    return z
