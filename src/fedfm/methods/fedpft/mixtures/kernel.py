"""Compiled EM for one group's rows, with spherical and diagonal covariances.

Each iteration makes one pass over the rows. It computes a row's responsibilities (E step) and adds the row to the sums
(M step). The float32 sums are of differences from the previous mean, because E[x^2] - mu^2 loses the variance of a
tight component. Every ``SPAN`` rows they are added to float64 sums.

Most components are far from most rows. For each row i and component k, b_ik is a lower bound of the Mahalanobis
distance D_ik, D^2 = sum_j (x_j - mu_j)^2 / v_j. When an M step changes mu to mu' and v to v', the triangle inequality
gives D' >= D min_j sqrt(v_j / v'_j) - sqrt(sum_j (mu'_j - mu_j)^2 / v'_j). A component whose bound implies a
responsibility below e^-FAR is skipped for that row. So a sum loses less than K e^-FAR = K 2e-9 of its value, which is
below the rounding of float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import SLACK, SPAN, compile_cached, part

FAR = 20.0
FALL = 1e-6  # relative to the log-likelihood; a smaller decrease is a rounding error of float32
NONE = 1e-10  # a component whose responsibilities sum to less is not updated


@part
def _flush(sums: Any, whole: Any) -> None:
    """Add the float32 sums to the float64 ones and clear them."""
    for c in range(whole.shape[0]):
        for j in range(whole.shape[1]):
            whole[c, j] += sums[c, j]
            sums[c, j] = 0


@part
def _update(c: int, n: float, floor: float, first: Any, second: Any, mu: Any, v: Any, inverse: Any) -> Any:
    """M step of component c from its sums over ``n`` rows. Returns log det Sigma, and (shrink, move) for the bounds.

    The work is split into several loops. Each loop uses so few arrays that the compiler vectorises it.
    """
    d, per, moved, shrink, log_det = mu.shape[1], 1 / n, 0.0, 1e300, 0.0
    if second.shape[1] == 1:
        for j in range(d):
            first[c, j] *= per
            moved += first[c, j] * first[c, j]
        for j in range(d):
            mu[c, j] += first[c, j]
        new = np.float32(max((second[c, 0] * per - moved) / d, 0.0) + floor)
        shrink, v[c, 0], inverse[c, 0] = v[c, 0] / new, new, 1 / new
        return d * math.log(new), math.sqrt(shrink), math.sqrt(moved / new)
    for j in range(d):
        first[c, j] *= per
        t = second[c, j] * per - first[c, j] * first[c, j]
        second[c, j] = (t if t > 0 else 0.0) + floor
    for j in range(d):
        q = 1 / second[c, j]
        inverse[c, j] = q
        moved += first[c, j] * first[c, j] * q
        q *= v[c, j]
        shrink = q if q < shrink else shrink
    for j in range(d):
        v[c, j] = second[c, j]
    for j in range(d):
        mu[c, j] += first[c, j]
    for at in range(0, d, 8):  # one logarithm for eight factors, each between 1e-12 and 1e31
        product = 1.0
        for j in range(at, min(at + 8, d)):
            product *= second[c, j]
        log_det += math.log(product)
    return log_det, math.sqrt(shrink), math.sqrt(moved)


@part
def _copy(mu: Any, v: Any, mu0: Any, v0: Any) -> None:
    """Copy mu and v to mu0 and v0 number by number, since assignments of complete arrays take seconds more to
    compile.
    """
    for c in range(mu.shape[0]):
        for j in range(mu.shape[1]):
            mu0[c, j] = mu[c, j]
        for j in range(mu.shape[1]):
            v0[c, j] = v[c, j]


@compile_cached
def em(x: Any, labels: Any, diag: bool, floor: float, tol: float, steps: int, weights: Any, work: Any) -> Any:
    """Fit centred rows ``x`` (n, d), starting from hard labels; each label must have a row.

    Fills ``weights`` (K,), ``work[0]`` with the means and ``work[1]`` with the variances (if spherical, column 0).
    ``work`` (7, K, d) is float32 and must be zero before. Returns the number of E steps, whether the last one changed
    the log-likelihood by less than ``tol``, and that log-likelihood as the mean over the rows.
    """
    (n, d), k = x.shape, len(weights)
    mu, v, inverse, first, second, mu0, v0 = work[0], work[1], work[2], work[3], work[4], work[5], work[6]
    first64, second64, counts = np.zeros((k, d)), np.zeros((k, d if diag else 1)), np.zeros(k)
    const, logs, seen, best = np.empty(k), np.empty(k), np.empty(k, np.int64), labels.copy()
    bound, shrink, move = np.zeros((n, k), np.float32), np.ones(k, np.float32), np.zeros(k, np.float32)
    weights0 = np.empty(k)  # weights before the last M step; mu0 and v0 are the means and variances before it

    for i in range(n):  # first each label's mean, then the sums about these means
        c = labels[i]
        counts[c] += 1
        for j in range(d):
            first64[c, j] += x[i, j]
    for c in range(k):
        for j in range(d):
            mu[c, j] = first64[c, j] / counts[c]
    first64[:] = 0
    counts[:] = 0

    last = -np.inf
    for step in range(steps + 1):
        total = 0.0
        for at in range(0, n, SPAN):
            for i in range(at, min(at + SPAN, n)):
                if step == 0:
                    seen[0], logs[0], many, mass = labels[i], 1.0, 1, 1.0
                else:
                    top, was, many, mass = -np.inf, best[i], 0, 0.0
                    for a in range(k):
                        # Begin with the component that was best for the row in the last pass.
                        c = was if a == 0 else (0 if a == was else a)
                        low = bound[i, c] * shrink[c] - move[c]
                        low = low if low > 0 else np.float32(0)
                        if const[c] - 0.5 * low * low > top - FAR:
                            q = np.float32(0)
                            if diag:
                                for j in range(d):
                                    t = x[i, j] - mu[c, j]
                                    q += t * t * inverse[c, j]
                            else:
                                for j in range(d):
                                    t = x[i, j] - mu[c, j]
                                    q += t * t
                                q *= inverse[c, 0]
                            low = np.float32(math.sqrt(q)) * SLACK
                            seen[many], logs[many] = c, const[c] - 0.5 * q
                            if logs[many] > top:
                                top, best[i] = logs[many], c
                            many += 1
                        bound[i, c] = low
                    for a in range(many):
                        gap = logs[a] - top
                        logs[a] = 1.0 if gap == 0 else (math.exp(gap) if gap > -FAR else 0.0)
                        mass += logs[a]
                    total += top if mass == 1 else top + math.log(mass)
                for a in range(many):
                    if logs[a] > 0:
                        c, share = seen[a], logs[a] / mass
                        counts[c] += share
                        r = np.float32(share)
                        if diag:
                            for j in range(d):
                                t = x[i, j] - mu[c, j]
                                first[c, j] += r * t
                                second[c, j] += r * t * t
                        else:
                            q = np.float32(0)
                            for j in range(d):
                                t = x[i, j] - mu[c, j]
                                first[c, j] += r * t
                                q += t * t
                            second[c, 0] += r * q
            _flush(first, first64)
            _flush(second, second64)
        new = total / n
        if step > 1 and new < last - FALL * (d + abs(last)):
            _copy(mu0, v0, mu, v)
            for c in range(k):
                weights[c] = weights0[c]
            return step, True, last
        _copy(mu, v, mu0, v0)
        for c in range(k):
            weights0[c] = weights[c]
            weights[c] = max(counts[c], 1e-300) / n
            if counts[c] > NONE:
                log_det, low, far = _update(c, counts[c], floor, first64, second64, mu, v, inverse)
                shrink[c], move[c] = low * SLACK, far / SLACK
                const[c] = -0.5 * (d * math.log(2 * math.pi) + log_det)
            else:  # the component does not change
                shrink[c], move[c] = 1, 0
                const[c] -= math.log(weights0[c])
            const[c] += math.log(weights[c])
        counts[:] = 0
        first64[:] = 0
        second64[:] = 0
        if step:
            if abs(new - last) < tol:
                return step, True, new
            last = new
    return steps, False, last
