"""Initial labels of a group's rows: k-means++ and a few iterations of k-means.

Like EM's kernel, k-means keeps lower bounds of the distances between rows and centres. It computes only the distances
that may be the smallest. If a centre moves by m, a distance to it falls by at most m.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedfm.linalg.kernels.jit import SLACK, compile_cached, part


@part
def _apart(x: Any, i: int, mu: Any, c: int) -> Any:
    """Squared Euclidean distance of row i from centre c."""
    q = np.float32(0)
    for j in range(x.shape[1]):
        t = x[i, j] - mu[c, j]
        q += t * t
    return q


def start(x: Any, k: int, seed: int, lloyd: int) -> Any:
    """Initial labels (n,), by k-means++ and ``lloyd`` iterations of k-means. Some labels may have no rows."""
    labels = np.zeros(len(x), np.int64)
    _kmeans(x, np.random.Generator(np.random.PCG64(seed)).random(k), labels, lloyd)
    return labels


@compile_cached
def _kmeans(x: Any, draws: Any, labels: Any, lloyd: int) -> None:
    n, d = x.shape
    most = len(draws)
    mu = np.zeros((most, d), np.float32)
    bound = np.zeros((n, most), np.float32)  # lower bounds of the distances from rows to centres
    near = np.full(n, np.float32(np.inf))  # squared distance to the nearest centre
    pick, k = min(int(draws[0] * n), n - 1), 0
    while True:
        total = 0.0
        for j in range(d):
            mu[k, j] = x[pick, j]
        for i in range(n):
            q = _apart(x, i, mu, k)
            bound[i, k] = math.sqrt(q) * SLACK
            if q < near[i]:
                near[i], labels[i] = q, k
            total += near[i]
        k += 1
        if k == most or not total > 0:  # there are k centres, or no further distinct row
            break
        rest = draws[k] * total
        for i in range(n):  # draw a row with probability proportional to its squared distance
            if near[i] > 0:
                pick = i
                rest -= near[i]
                if rest < 0:
                    break
    sums, counts, move = np.empty((k, d)), np.empty(k), np.zeros(k, np.float32)
    for _ in range(lloyd):
        sums[:] = 0
        counts[:] = 0
        for i in range(n):
            c = labels[i]
            counts[c] += 1
            for j in range(d):
                sums[c, j] += x[i, j]
        for c in range(k):
            moved = 0.0
            for j in range(d):
                new = np.float32(sums[c, j] / counts[c]) if counts[c] > 0 else mu[c, j]
                moved += (new - mu[c, j]) ** 2
                mu[c, j] = new
            move[c] = math.sqrt(moved) / SLACK
        changed = False
        for i in range(n):
            was = labels[i]
            best, least = was, _apart(x, i, mu, was)
            bound[i, was] = math.sqrt(least) * SLACK
            for c in range(k):
                if c == was:
                    continue
                low = max(bound[i, c] - move[c], np.float32(0))
                if low * low < least:
                    q = _apart(x, i, mu, c)
                    low = math.sqrt(q) * SLACK
                    if q < least:
                        best, least = c, q
                bound[i, c] = low
            changed |= best != was
            labels[i] = best
        if not changed:
            break
